"""Latencies on a partition of the SMs: Harli section 5, two stages, learned from every iteration on one."""

from __future__ import annotations

from collections.abc import Callable

from cotenant.core.plan import BatchShape, Partition
from cotenant.predictor.linear import OnlineLinearModel
from cotenant.predictor.ratio import Ratio
from cotenant.predictor.records import STALE_AFTER
from cotenant.predictor.shapes import adapter_features

# What a co-run factor is taken for until some were measured: two tenants at full speed slow a decode step on an H200 by
# 15 to 25% on every partition.
CONTENTION = 1.25
_SMS_SCALES = (64.0, 64.0)
_STEP_SCALES = (1.0, 8.0, 4096.0, 1.0, 1.0)

Sms = tuple[int, ...]


class PartitionModels:
    """Decode steps and tasklets on partitions. Stage 1 is Equation 2, a model for each number of online SMs. Stage 2 is
    Equation 3: a co-run takes b1 x online SMs + k1 x best-effort SMs times as long, one model for all. (Harli has
    shares of the device's SMs; numbers of them only rescale b1 and k1.)

    A server that always has tasklets beside its steps measures little of stage 1. Equation 2 is fitted to a partition's
    co-runs as well, which by Equation 3 are a multiple of it, and comes first where it reaches.

    ``models``: of stage 1 by (online SMs,), of a partition's co-runs by both numbers, Equation 3 by (). ``ratios``:
    tasklets there against alone on all SMs by (best-effort SMs,), co-runs against stage 1 by (). Keys are plain tuples:
    a ``Partition`` equals that of its two numbers, so what comes from a file is found by it.
    """

    def __init__(self) -> None:
        self.models: dict[Sms, OnlineLinearModel] = {}
        self.ratios: dict[Sms, Ratio] = {}
        self._last_together: dict[Sms, int] = {}  # the iteration of a partition's last co-run

    def num_together(self, partition: Partition, iteration: int) -> int:
        """Co-runs that were measured there, 0 if for long none was: what took too long once may not now."""
        model = self.models.get(partition)
        return 0 if model is None or self._is_stale(partition, iteration) else model.num_samples

    def model(self, sms: Sms) -> OnlineLinearModel:
        """The one of these SMs, new if there is none."""
        return self.models.setdefault(sms, OnlineLinearModel(_STEP_SCALES if sms else _SMS_SCALES))

    def alone_ms(self, batch: BatchShape, online_sms: int) -> float | None:
        """Stage 1: a decode step with nothing beside it. None for other batches, and where no model reaches."""
        return self._step_ms((online_sms,), batch)

    def together_ms(
        self, batch: BatchShape, partition: Partition, alone_ms: Callable[[], float | None]
    ) -> float | None:
        """Beside training: what this partition's co-runs say, or stage 2 of ``alone_ms``, which a step takes on its
        online SMs."""
        measured_ms = self._step_ms(partition, batch)
        if measured_ms is not None:
            return measured_ms
        by_itself_ms = alone_ms()
        return None if by_itself_ms is None else by_itself_ms * self._factor(partition)

    def guessed_alone_ms(self, batch: BatchShape, partition: Partition) -> float | None:
        """Where stage 1 does not reach: what this partition's co-runs say, by stage 2 the other way round."""
        measured_ms = self._step_ms(partition, batch)
        return None if measured_ms is None else measured_ms / self._factor(partition, cautious=False)

    def tasklet_factor(self, best_effort_sms: int) -> float | None:
        """How many times what they take alone on all SMs tasklets take there, beside a batch on the others."""
        ratio = self.ratios.get((best_effort_sms,))
        return ratio.cautious if ratio is not None and ratio.known else None

    def observe_alone(self, batch: BatchShape, online_sms: int, measured_ms: float) -> None:
        self._learn_step((online_sms,), batch, measured_ms)

    def observe_together(
        self, batch: BatchShape, partition: Partition, measured_ms: float, alone_ms: float | None, iteration: int
    ) -> None:
        """``alone_ms``: what stage 1 says of this batch, if anything."""
        if self._is_stale(partition, iteration):
            self.models.pop(partition, None)
            self.ratios.pop((partition.best_effort_sms,), None)
        self._last_together[partition] = iteration
        self._learn_step(partition, batch, measured_ms)
        if alone_ms:
            self.model(()).update(_features_of(partition), measured_ms / alone_ms)
            self.ratios.setdefault((), Ratio()).add(measured_ms, alone_ms)

    def observe_tasklet(self, best_effort_sms: int, measured_ms: float, alone_ms: float) -> None:
        """``alone_ms``: what such a tasklet takes alone on all SMs."""
        self.ratios.setdefault((best_effort_sms,), Ratio()).add(measured_ms, alone_ms)

    def _is_stale(self, partition: Partition, iteration: int) -> bool:
        """One that came from a file counts from when it is first asked about."""
        return iteration - self._last_together.setdefault(partition, iteration) > STALE_AFTER

    def _factor(self, partition: Partition, *, cautious: bool = True) -> float:
        """Equation 3's, where it was measured enough; else the mean of those measured, ``cautious``: and a deviation on
        top. A co-run is not faster."""
        model, ratio = self.models.get(()), self.ratios.get(())
        factor = None if model is None else model.reached(_features_of(partition))
        if factor is not None:
            return max(1.0, factor)
        if ratio is None or not ratio.known:
            return CONTENTION
        return max(1.0, ratio.cautious if cautious else ratio.mean)

    def _step_ms(self, sms: Sms, batch: BatchShape) -> float | None:
        model = self.models.get(sms)
        if model is None or batch.prefill_tokens:
            return None
        return model.reached(_step_features(batch)) or None  # 0: out of its range

    def _learn_step(self, sms: Sms, batch: BatchShape, measured_ms: float) -> None:
        if not batch.prefill_tokens:
            self.model(sms).update(_step_features(batch), measured_ms)


def _features_of(partition: Partition) -> tuple[float, ...]:
    return (float(partition.online_sms), float(partition.best_effort_sms))


def _step_features(batch: BatchShape) -> tuple[float, ...]:
    """Equation 2's, of c, b and k; and adapters', of which Harli's requests have none."""
    return (1.0, float(batch.num_decode), float(batch.context_tokens), *adapter_features(batch))
