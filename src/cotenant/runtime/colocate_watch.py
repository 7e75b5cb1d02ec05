"""What the iterations of a cell of `cotenant bench colocate` did, and what comes of it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

from cotenant.core.plan import IterationRecord, Mode, Slo
from cotenant.runtime.colocate_cell import Cell, Errors, Predicted, judge
from cotenant.runtime.load import Load
from cotenant.runtime.tenants import Tenants
from cotenant.runtime.timeline import Timeline


@dataclass(slots=True)
class Watch:
    """What iterations did, and how far training had come when: a step's tokens count as its tasklets run."""

    load: Load
    tenants: Tenants
    step_tokens: int
    timeline: Timeline
    modes: Counter[str] = field(default_factory=Counter)
    errors: dict[str, Errors] = field(default_factory=lambda: {"alone": Errors(), "co_run": Errors()})
    num_tasklets: int = 0  # that ended
    step_tasklets: int = 0  # of the longest step so far, of whichever watch: all are alike
    noted_s: float = field(init=False)  # when the last iteration was, by the load's clock

    def __post_init__(self) -> None:
        self.noted_s = self.load.now_s
        self._note_tokens(self.noted_s)

    def note(self, record: IterationRecord) -> None:
        now_s = self.load.now_s
        self.timeline.note(now_s, record)
        self.num_tasklets += record.num_tasklets
        self._note_tokens(now_s)
        if not record.batch.empty:
            self.modes[record.mode.value] += 1
            deviation = self.tenants.predictor.last_deviation_ratio
            if deviation is not None:
                is_alone = record.mode is Mode.NONE
                found = Predicted(deviation, now_s, (now_s - self.noted_s) * 1e3, record)
                self.errors["alone" if is_alone else "co_run"].add(found)
        self.noted_s = now_s

    def _note_tokens(self, now_s: float) -> None:
        training = self.tenants.training
        if training.job_id is not None:
            view = training.view()
            num_left = view.num_left if view is not None else 0
            self.step_tasklets = max(self.step_tasklets, num_left)
            done = 1 - num_left / self.step_tasklets if num_left else 0.0
            self.timeline.note_tokens(now_s, training.trained_tokens + done * self.step_tokens)


def measured_cell(
    policy: str,
    slo: Slo,
    watch: Watch,
    start_s: float,
    end_s: float,
    utilisation: dict[str, float] | None,
    device_time: dict[str, float] | None = None,
    *,
    judged_until_s: float | None = None,
) -> Cell:
    """``judged_until_s``: of requests from their beginning; None: of those that decode in this time."""
    with_ttft, until_s = judged_until_s is not None, math.inf if judged_until_s is None else judged_until_s
    return replace(
        judge(policy, slo, watch.load.answers, start_s, end_s, with_ttft=with_ttft, until_s=until_s),
        train_tokens_per_s=watch.timeline.tokens_per_s(start_s, end_s),
        modes=dict(watch.modes),
        errors=watch.errors,
        timeline=watch.timeline.figures(start_s, end_s),
        utilisation=utilisation,
        device_time=device_time,
    )
