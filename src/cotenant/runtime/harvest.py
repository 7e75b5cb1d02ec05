"""What training makes of the time that it shares with requests, of late."""

from __future__ import annotations

import math

from cotenant.core.plan import IterationRecord
from cotenant.core.tasklet import TaskletRun
from cotenant.predictor.predictor import LatencyPredictor

_FADES_S = 5.0  # to 1/e


class Harvest:
    """The time that tasklets would have taken alone, as a share of all time with a job. Older iterations fade."""

    def __init__(self, predictor: LatencyPredictor) -> None:
        self._predictor = predictor
        self._alone_s = 0.0
        self._total_s = 0.0
        self._since_s: float | None = None  # the end of the iteration before, if there was a job then

    @property
    def ratio(self) -> float | None:
        """None before a job's first iterations have ended."""
        return self._alone_s / self._total_s if self._total_s > 0 else None

    def note(self, record: IterationRecord, now_s: float, *, has_job: bool) -> None:
        """An iteration that ended at ``now_s``; the predictor has observed it."""
        if not has_job:
            self._alone_s = self._total_s = 0.0
            self._since_s = None
            return
        if self._since_s is not None:
            passed_s = now_s - self._since_s
            kept = math.exp(-passed_s / _FADES_S)
            self._alone_s = kept * self._alone_s + self._alone_ms(record) / 1e3
            self._total_s = kept * self._total_s + passed_s
        self._since_s = now_s

    def _alone_ms(self, record: IterationRecord) -> float:
        """Of all tasklets that ended. What is not known yet: as measured on all SMs, or as the prior says."""
        alone_ms = 0.0
        for run, elapsed_ms in record.tasklets:
            each_ms = self._predictor.tasklet_ms(run.shape, cautious=False)
            alone_ms += elapsed_ms if each_ms is None else run.count * each_ms
        others: list[TaskletRun] = [*(run for run, _ in record.beside), *record.untimed]
        if record.fused is not None:
            others.append(record.fused)
        for run in others:
            each_ms = self._predictor.tasklet_ms(run.shape, cautious=False)
            alone_ms += run.count * (self._predictor.first_tasklet_ms(run.shape) if each_ms is None else each_ms)
        return alone_ms
