"""The roofline, corrected by what was measured of each kind of work: LLMStation section 4.2's learned weights."""

from __future__ import annotations

from cotenant.core.plan import BatchShape, Partition
from cotenant.core.tasklet import TaskletShape
from cotenant.predictor.ratio import Ratio
from cotenant.predictor.roofline import Roofline
from cotenant.predictor.spatial import CONTENTION

# Shapes of one kind differ in how near they come to the roofline: what a shape itself was not measured for.
ALLOWANCE = 1.25
# The same where nothing of the kind was measured: an 8B model's decode steps on an H200 come within 1.35 times the
# roofline. Small models, with which the host is what takes long, do not.
UNMEASURED = 1.5


class Prior:
    """Speaks of a kind of work once some of it was measured, of whatever shape; of batches on all SMs also before that
    (``unmeasured_ms``), for those who know of nothing better. ``ratios``: measured against the roofline, by kind of
    work and where: on all SMs, on a partition, or on one beside the other tenant."""

    def __init__(self, roofline: Roofline) -> None:
        self._roofline = roofline
        self.ratios: dict[str, Ratio] = {}

    def batch_ms(
        self, batch: BatchShape, partition: Partition | None = None, *, beside_training: bool = False
    ) -> float | None:
        """An online batch, with an allowance for error. On a partition, without measurements on any, those on all SMs
        count, and the other tenant costs what ``CONTENTION`` says."""
        kind = _kind_of(batch)
        if partition is None:
            return self._known_ms(kind, self._roofline.batch_ms(batch), 1.0)
        roofline_ms = self._roofline.batch_ms(batch, partition.online_sms)
        contention = CONTENTION if beside_training else 1.0
        together_ms = self._known_ms(_beside(kind), roofline_ms, 1.0) if beside_training else None
        return (
            together_ms
            or self._known_ms(_on_partition(kind), roofline_ms, contention)
            or self._known_ms(kind, roofline_ms, contention)
        )

    def unmeasured_ms(self, batch: BatchShape) -> float | None:
        """One of a kind of which nothing was measured, on all SMs: by the bare roofline, and as far from it as other
        kinds are if that is more."""
        roofline_ms = self._roofline.batch_ms(batch)
        ratios = [ratio.cautious for ratio in self.ratios.values() if ratio.known]
        return roofline_ms * max([UNMEASURED, *ratios]) if roofline_ms > 0 else None

    def tasklet_ms(self, shape: TaskletShape, partition: Partition) -> float | None:
        """A tasklet on a partition's best-effort SMs, beside a batch on the others; as ``batch_ms``."""
        roofline_ms = self._roofline.tasklet_ms(shape, partition.best_effort_sms)
        kind = shape.kind.value
        return self._known_ms(_beside(kind), roofline_ms, 1.0) or self._known_ms(kind, roofline_ms, CONTENTION)

    def first_ms(self, shape: TaskletShape) -> float:
        """What a tasklet of a shape that was never run should take on all SMs: without an allowance, and by the bare
        roofline if its kind was not measured either."""
        ratio = self.ratios.get(shape.kind.value)
        return self._roofline.tasklet_ms(shape) * (ratio.mean if ratio is not None and ratio.known else 1.0)

    def observe_batch(
        self,
        batch: BatchShape,
        measured_ms: float,
        partition: Partition | None = None,
        *,
        beside_training: bool = False,
    ) -> None:
        kind, num_sms = _kind_of(batch), None
        if partition is not None:
            num_sms = partition.online_sms
            kind = _beside(kind) if beside_training else _on_partition(kind)
        self._add(kind, measured_ms, self._roofline.batch_ms(batch, num_sms))

    def observe_tasklet(self, shape: TaskletShape, measured_ms: float, partition: Partition | None = None) -> None:
        kind, num_sms = shape.kind.value, None
        if partition is not None:
            kind, num_sms = _beside(kind), partition.best_effort_sms
        self._add(kind, measured_ms, self._roofline.tasklet_ms(shape, num_sms))

    def _add(self, kind: str, measured_ms: float, roofline_ms: float) -> None:
        self.ratios.setdefault(kind, Ratio()).add(measured_ms, roofline_ms)

    def _known_ms(self, kind: str, roofline_ms: float, factor: float) -> float | None:
        ratio = self.ratios.get(kind)
        if ratio is None or not ratio.known or roofline_ms <= 0:
            return None
        return roofline_ms * ratio.cautious * factor * ALLOWANCE


def _kind_of(batch: BatchShape) -> str:
    return "prompts" if batch.prefill_tokens else "decodes"


def _on_partition(kind: str) -> str:
    return f"{kind} on a partition"


def _beside(kind: str) -> str:
    return f"{kind} beside the other tenant"
