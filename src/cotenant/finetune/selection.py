"""Which step's adapter is the best on the validation file, and whether to go on looking for a better one.

The rules are those of transformers' ``Trainer`` (``load_best_model_at_end``) and ``EarlyStoppingCallback``. Everything
follows from the steps' figures, so a job that is taken up again gets here by adding the recorded ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from cotenant.core.job import BEST_METRICS, Hyperparameters, StepMetrics


class Selection:
    """Follows ``metric_for_best_model`` over the steps on which the whole validation file was measured.

    ``best_step`` is None before the first measurement. A figure that is not finite counts as not measured: that is how
    it is recorded.
    """

    def __init__(self, hyper: Hyperparameters) -> None:
        self._field, self._greater_is_better = BEST_METRICS[hyper.metric_for_best_model]
        self._patience = hyper.early_stopping_patience
        self._threshold = hyper.early_stopping_threshold
        self._is_for_result = hyper.load_best_model_at_end
        self._num_worse = 0
        self._best = math.nan
        self.best_step: int | None = None

    @property
    def result_step(self) -> int | None:
        """The step whose adapter is the job's result, if that is to be the best one's."""
        return self.best_step if self._is_for_result else None

    @property
    def stops(self) -> bool:
        """Whether ``early_stopping_patience`` measurements in a row were no better than the best before them."""
        return 0 < self._patience <= self._num_worse

    def add(self, metrics: StepMetrics) -> bool:
        """Take a step's figures in. Whether it is the best so far."""
        value = _value(metrics, self._field)
        if value is None or not math.isfinite(value):
            return False
        gain = value - self._best if self._greater_is_better else self._best - value
        is_better = self.best_step is None or gain > 0
        # As transformers has it: less than the threshold is a new best, and no reason to go on.
        self._num_worse = 0 if is_better and (self.best_step is None or gain > self._threshold) else self._num_worse + 1
        if is_better:
            self._best, self.best_step = value, metrics.step
        return is_better


def best_of(steps: Iterable[StepMetrics], hyper: Hyperparameters) -> Selection:
    """That of steps which are over."""
    selection = Selection(hyper)
    for step in steps:
        selection.add(step)
    return selection


def _value(metrics: StepMetrics, field: str) -> float | None:
    """``field`` may lead through a part, 'part.field'; None where that was not measured."""
    part, _, name = field.rpartition(".")
    owner = getattr(metrics, part) if part else metrics
    value: float | None = None if owner is None else getattr(owner, name)
    return value
