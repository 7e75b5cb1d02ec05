"""What tasklets take alone on all SMs: by records, else by a linear model of their kind, which all jobs teach."""

from __future__ import annotations

from cotenant.core.tasklet import TaskletKind, TaskletShape
from cotenant.predictor.linear import OnlineLinearModel
from cotenant.predictor.prior import Prior
from cotenant.predictor.records import Group, RecordCache
from cotenant.predictor.shapes import TASKLET_SCALES, tasklet_features, tasklet_key

# A model learns from so many measurements of one shape, which cost more than its record does, and then from those that
# it does not agree with: the machine may have changed.
_MOST_SAMPLES = 64
_AGREEMENT = 0.05
_MOST_TIMES = 8.0  # what a model says; it learns from no more than that: a process may have been stopped
# With no tasklet for so many iterations, seconds, a guess that keeps one from running is doubted: nothing but a
# measurement can correct it, and what another job's took tells little of it.
_STANDS_AFTER = 300

TaskletKey = tuple[str, int, int, str]


class TaskletTimes:
    """``trained``: what the job trains whose tasklets run, as far as their times depend on it besides their shape."""

    def __init__(self, records: RecordCache, base_group: Group, prior: Prior | None) -> None:
        self._records, self._base_group, self._prior = records, base_group, prior
        self.models: dict[TaskletKind, OnlineLinearModel] = {}
        self.trained = ""
        self._last_ran = 0  # the iteration that had one, or in which a job came

    def trains(self, what: str) -> None:
        """A job has come. What was measured of other jobs' tells of its tasklets by way of the models alone."""
        self.trained = what
        self._last_ran = self._records.iteration

    def ran(self) -> None:
        """Some have run in this iteration."""
        self._last_ran = self._records.iteration

    def key(self, shape: TaskletShape) -> TaskletKey:
        """What records tell tasklets apart by."""
        return tasklet_key(shape, self.trained)

    def alone_ms(self, shape: TaskletShape, *, cautious: bool) -> float | None:
        """``cautious``: what a record says counts with a deviation on top of its mean."""
        record = self._records.find(self._base_group, ("tasklet", self.key(shape)))
        return self._modelled_ms(shape) if record is None else record.latency_ms(cautious=cautious)

    def may_have_changed(self, shape: TaskletShape) -> bool:
        """See ``LatencyPredictor.may_have_changed``."""
        key = ("tasklet", self.key(shape))
        if self._records.find(self._base_group, key) is None:
            return self._records.iteration - self._last_ran > _STANDS_AFTER
        return self._records.is_due(self._base_group, key)

    def first_ms(self, shape: TaskletShape) -> float:
        """What one of which nobody knows should take, as far as the prior goes; 0 without one."""
        return 0.0 if self._prior is None else self._prior.first_ms(shape)

    def bounded_ms(self, shape: TaskletShape, each_ms: float) -> float:
        """An outlier cut to what this tasklet may take at worst. Uncut, it would rule the tasklet out beside a batch
        where it was never measured before, and so keep it from being measured there again."""
        known = self._records.find(self._base_group, ("tasklet", self.key(shape)))
        return each_ms if known is None else known.bounded(each_ms)

    def observe(self, shape: TaskletShape, each_ms: float, num: int = 1) -> None:
        """Learn from a measurement as it is believed (``bounded_ms``), the mean of ``num``."""
        record = self._records.add(self._base_group, ("tasklet", self.key(shape)), each_ms, num)
        # The model is asked for shapes without a record alone.
        model, features = self.model(shape.kind), tasklet_features(shape)
        if guessed_ms := model.reached(features):
            each_ms = min(each_ms, _MOST_TIMES * guessed_ms)
        if record.count <= _MOST_SAMPLES or abs(model.predict(features) - each_ms) > _AGREEMENT * each_ms:
            model.update(features, each_ms)
            if self._prior is not None:
                self._prior.observe_tasklet(shape, each_ms)

    def model(self, kind: TaskletKind) -> OnlineLinearModel:
        """The one of this kind, new if there is none."""
        model = self.models.get(kind)
        if model is None:
            model = self.models[kind] = OnlineLinearModel(TASKLET_SCALES)
        return model

    def _modelled_ms(self, shape: TaskletShape) -> float | None:
        """None where no model reaches, if a prior can say what the shape's first tasklet should take. (Without one, a
        guess is better than to try every shape.)"""
        model, features = self.models.get(shape.kind), tasklet_features(shape)
        if model is None:
            return None
        if self._prior is not None:
            return model.reached(features) or None
        return model.predict(features) or None if model.ready else None
