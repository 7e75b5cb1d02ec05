"""Tells, once, that the TPOT target is out of reach: else attainment falls and training stands, and nobody says why."""

from __future__ import annotations

import logging

from cotenant.core.plan import IterationRecord, Mode, Slo

logger = logging.getLogger(__name__)

_STEPS = 200  # in a row


class TargetReach:
    """Watches decode steps that nothing shares."""

    def __init__(self, slo: Slo) -> None:
        self._tpot_ms = slo.tpot_ms
        self._num_longer = 0
        self._is_told = False

    def note(self, record: IterationRecord) -> None:
        batch = record.batch
        if not batch.num_decode or batch.prefill_tokens or record.mode is not Mode.NONE or record.is_disturbed:
            return
        self._num_longer = self._num_longer + 1 if record.online_ms > self._tpot_ms else 0
        if self._num_longer == _STEPS and not self._is_told:
            self._is_told = True
            logger.warning(
                "the TPOT target is %.4g ms, and %d decode steps in a row took longer without training, the last one "
                "%.4g ms for %d requests: they are late whatever training does, and it is held back for them. A longer "
                "target (--slo-tpot-ms) or fewer requests at a time (`serve`: --max-num-seqs; `bench colocate`: "
                "--batch-sizes, --time-scale)",
                self._tpot_ms,
                _STEPS,
                record.online_ms,
                batch.num_decode,
            )
