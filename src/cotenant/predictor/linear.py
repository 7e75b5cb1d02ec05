"""A linear model learned one measurement at a time.

Recursive least squares: LLMStation section 4.2 uses linear models over simple features; learning them online replaces
its offline profiling runs. Forgetting is directional (Kulhavy, 1987): a measurement takes the place of older ones like
it, and what it does not touch stays as it is. Forgotten evenly, what is not measured for some thousand iterations would
be lost, and the covariance would grow without bound, its rounding errors first. In directions that measurements hardly
vary in, the slope over contexts against the intercept, it forgets next to nothing by itself: there each measurement
adds a little doubt, or a machine that has changed after hours would be noticed only after as many. Vectors have two to
nine entries, for which plain floats are faster than arrays.
"""

from __future__ import annotations

import math
from operator import mul
from typing import NamedTuple

_FORGETTING = 0.99
_PRIOR_VARIANCE = 1e4
_REACH = 4.0  # the variance of a prediction, in those of one measurement, up to which it rests on measurements
_RESTORED_DOUBT = 10.0
# Added to the variance of each weight at each measurement: with a tenth of it a slope that has doubled takes thousands
# of measurements to be noticed after hours, with ten times as much the noise of measurements begins to show. It ends at
# the most: with more, what is far from all that is measured now would soon be out of reach.
_DOUBT, _MOST_DOUBT = 1e-6, 1e-3
# Times that the error of a small target counts, and that of a large one: were it less, what was believed before the
# first measurement would outweigh many.
_MOST_COUNTED, _LEAST_COUNTED = 10.0, 0.02


class LinearState(NamedTuple):
    """All that was learned: ``covariance`` row by row."""

    weights: list[float]
    covariance: list[float]
    num_samples: int


class OnlineLinearModel:
    """Predicts ``weights · features``. ``scales`` bring each feature near 1: the update stays well conditioned.

    ``typical``: errors count by their share of the target; of a target of that size as without. None: as they are.
    ``forgetting``: what is left, after a measurement, of older ones like it.
    """

    def __init__(
        self, scales: tuple[float, ...], typical: float | None = None, forgetting: float = _FORGETTING
    ) -> None:
        self._factors = [1.0 / scale for scale in scales]
        self._typical = typical
        self._least_variance = 1.0 / forgetting - 1.0
        self._weights = [0.0] * len(scales)
        self._covariance = [  # [features][features], symmetric
            [_PRIOR_VARIANCE if row == column else 0.0 for column in range(len(scales))] for row in range(len(scales))
        ]
        self._halves: list[list[float]] = []  # of the covariance as it is now; none: not made since it changed
        self.num_samples = 0

    @property
    def ready(self) -> bool:
        """True once there were more measurements than weights."""
        return self.num_samples > len(self._weights)

    def predict(self, features: tuple[float, ...]) -> float:
        """The estimate, in the unit of the targets; never negative."""
        return max(0.0, self._estimate(self._scaled(features)))

    def reached(self, features: tuple[float, ...]) -> float | None:
        """What ``predict`` says, if it rests on what was measured and not on weights that no measurement has told."""
        if not self.ready:
            return None
        x = list(map(mul, features, self._factors))  # asked some times for each plan: so no functions of its own
        while x and not x[-1]:  # of adapters, mostly: what is 0 adds nothing
            x.pop()
        estimate = max(0.0, sum(map(mul, self._weights, x), 0.0))
        variance = 0.0
        for each, row in zip(x, self._halves or self._make_halves(), strict=False):  # as far as ``x`` goes
            variance += each * sum(map(mul, row, x), 0.0)
        return estimate if variance * self._counts(estimate) ** 2 <= _REACH else None

    def update(self, features: tuple[float, ...], target: float) -> None:
        """Learn from one measurement. Older ones count less and less."""
        counts = self._counts(target)
        x = [counts * each for each in self._scaled(features)]
        target *= counts
        spread = self._spread(x)
        variance = _dot(x, spread)
        if variance > 0:
            correction = (target - self._estimate(x)) / (1.0 + variance)
            self._weights = [weight + correction * each for weight, each in zip(self._weights, spread, strict=True)]
            # Its fixed point, a variance of 1 / forgetting - 1, is that of about 1 / (1 - forgetting) measurements.
            learned = (1.0 - self._least_variance / variance) / (1.0 + variance)
            self._covariance = [  # each * other first: it stays symmetric to the last bit
                [value - learned * (each * other) for value, other in zip(row, spread, strict=True)]
                for row, each in zip(self._covariance, spread, strict=True)
            ]
            for place, row in enumerate(self._covariance):
                if row[place] < _MOST_DOUBT:
                    row[place] += _DOUBT
        self._halves = []
        self.num_samples += 1

    def state(self) -> LinearState:
        return LinearState(list(self._weights), [value for row in self._covariance for value in row], self.num_samples)

    def check(self, state: LinearState) -> None:
        """Raises ValueError for a state of another number of features, or with values that cannot be."""
        size = len(self._weights)
        numbers, trace = (*state.weights, *state.covariance), sum(state.covariance[:: size + 1])
        is_of_size = (len(state.weights), len(state.covariance)) == (size, size * size)
        if not is_of_size or not all(map(math.isfinite, numbers)) or trace <= 0:
            raise ValueError(f"no state of a linear model of {size} features")

    def restore(self, state: LinearState) -> None:
        """Take over what another model learned; what comes now counts more than it does. Raises as ``check``."""
        self.check(state)
        size = len(self._weights)
        self._weights = list(state.weights)
        self._covariance = [state.covariance[start : start + size] for start in range(0, size * size, size)]
        doubt = min(_RESTORED_DOUBT, max(1.0, size * _PRIOR_VARIANCE / sum(state.covariance[:: size + 1])))
        self._covariance = [[value * doubt for value in row] for row in self._covariance]
        self._halves = []
        self.num_samples = state.num_samples

    def _make_halves(self) -> list[list[float]]:
        """Each row of the covariance up to its diagonal, twice what is off it: enough for a variance, in half the
        products."""
        self._halves = [
            [2.0 * value for value in row[:place]] + [row[place]] for place, row in enumerate(self._covariance)
        ]
        return self._halves

    def _scaled(self, features: tuple[float, ...]) -> list[float]:
        return list(map(mul, features, self._factors))

    def _counts(self, target: float) -> float:
        """How many times the error of such a target counts."""
        if self._typical is None:
            return 1.0
        counts = self._typical / target if target > 1e-9 else _MOST_COUNTED
        return _MOST_COUNTED if counts > _MOST_COUNTED else max(_LEAST_COUNTED, counts)

    def _estimate(self, x: list[float]) -> float:
        return _dot(self._weights, x)

    def _spread(self, x: list[float]) -> list[float]:
        """``covariance · x``, as far as ``x`` goes: what follows is 0."""
        return [_dot(row, x) for row in self._covariance[: len(x)]]


def _dot(left: list[float], right: list[float]) -> float:
    return sum(map(mul, left, right), 0.0)
