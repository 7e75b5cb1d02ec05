"""A linear model learned one measurement at a time.

Recursive least squares: LLMStation section 4.2 uses linear models over simple features; learning them online replaces
its offline profiling runs. Forgetting is directional (Kulhavy, 1987): a measurement takes the place of older ones like
it, and what it does not touch stays as it is. Forgotten evenly, what is not measured for some thousand iterations would
be lost, and the covariance would grow without bound, its rounding errors first. In directions that measurements hardly
vary in, the slope over contexts against the intercept, it forgets next to nothing by itself: there each measurement
adds a little doubt, or a machine that has changed after hours would be noticed only after as many. Vectors have two to
nine entries, for which plain floats are faster than arrays, and sums that are written out than loops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import mul
from typing import NamedTuple, cast

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

# No number of what was measured comes near.
MOST_NUMBER = 1e12


class LinearState(NamedTuple):
    """All that was learned: ``covariance`` row by row."""

    weights: list[float]
    covariance: list[float]
    num_samples: int


# Of features, of weights, and of a quadratic form's terms (see ``_form_of``): weights · features, and the form of them.
_Form = Callable[[Sequence[float], list[float], list[float]], tuple[float, float]]


class OnlineLinearModel:
    """Predicts ``weights · features``. ``scales`` bring each feature near 1: the update stays well conditioned.
    Features that are left off at the end are 0.

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
        # For so many features, not scaled, the form and what it takes: those made since the last measurement.
        self._forms: dict[int, tuple[_Form, list[float], list[float]]] = {}
        self.num_samples = 0

    @property
    def ready(self) -> bool:
        """True once there were more measurements than weights."""
        return self.num_samples > len(self._weights)

    def predict(self, features: Sequence[float]) -> float:
        """The estimate, in the unit of the targets; never negative."""
        form, weights, terms = self._forms.get(len(features)) or self._make_form(len(features))
        return max(0.0, form(features, weights, terms)[0])

    def reached(self, features: Sequence[float]) -> float | None:
        """What ``predict`` says, if it rests on what was measured and not on weights that no measurement has told."""
        if not self.ready:
            return None
        form, weights, terms = self._forms.get(len(features)) or self._make_form(len(features))
        estimate, variance = form(features, weights, terms)
        estimate = estimate if estimate > 0.0 else 0.0
        return estimate if variance * self._counts(estimate) ** 2 <= _REACH else None

    def update(self, features: Sequence[float], target: float) -> None:
        """Learn from one measurement. Older ones count less and less."""
        counts = self._counts(target)
        x = [counts * each for each in map(mul, features, self._factors)]
        target *= counts
        spread = [_dot(row, x) for row in self._covariance]  # covariance · x
        variance = _dot(x, spread)
        if variance > 0:
            correction = (target - _dot(self._weights, x)) / (1.0 + variance)
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
        self._forms.clear()
        self.num_samples += 1

    def state(self) -> LinearState:
        """To go on with later; that of a model which has learned nothing if this one holds what cannot have been
        measured, as may come of what it was given: nobody would take that over, nor the rest that was learned."""
        covariance = [value for row in self._covariance for value in row]
        numbers = (*self._weights, *covariance)
        if all(abs(number) < MOST_NUMBER for number in numbers) and _is_covariance(self._covariance):
            return LinearState(list(self._weights), covariance, self.num_samples)
        return OnlineLinearModel((1.0,) * len(self._weights)).state()

    def check(self, state: LinearState) -> None:
        """Raises ValueError for a state of another number of features, or with values that cannot be."""
        size, numbers = len(self._weights), (*state.weights, *state.covariance)
        is_of_size = (len(state.weights), len(state.covariance)) == (size, size * size)
        if not is_of_size or not all(map(math.isfinite, numbers)) or not _is_covariance(_rows(state, size)):
            raise ValueError(f"no state of a linear model of {size} features")

    def restore(self, state: LinearState) -> None:
        """Take over what another model learned; what comes now counts more than it does. Raises as ``check``."""
        self.check(state)
        size = len(self._weights)
        self._weights = list(state.weights)
        self._covariance = _rows(state, size)
        doubt = min(_RESTORED_DOUBT, max(1.0, size * _PRIOR_VARIANCE / sum(state.covariance[:: size + 1])))
        self._covariance = [[value * doubt for value in row] for row in self._covariance]
        self._forms.clear()
        self.num_samples = state.num_samples

    def _make_form(self, size: int) -> tuple[_Form, list[float], list[float]]:
        factors = self._factors[:size]
        weights = list(map(mul, self._weights, factors))
        terms = []
        for place, (row, factor) in enumerate(zip(self._covariance, factors, strict=False)):
            terms += [2.0 * value * factor * other for value, other in zip(row[:place], factors, strict=False)]
            terms.append(row[place] * factor * factor)
        made = self._forms[size] = _form_of(size), weights, terms
        return made

    def _counts(self, target: float) -> float:
        """How many times the error of such a target counts."""
        if self._typical is None:
            return 1.0
        counts = self._typical / target if target > 1e-9 else _MOST_COUNTED
        if counts > _MOST_COUNTED:
            return _MOST_COUNTED
        return counts if counts > _LEAST_COUNTED else _LEAST_COUNTED


def _rows(state: LinearState, size: int) -> list[list[float]]:
    return [state.covariance[start : start + size] for start in range(0, size * size, size)]


def _is_covariance(matrix: list[list[float]]) -> bool:
    """Whether it is symmetric and positive definite, by Cholesky's decomposition: where variances came out below 0, a
    model would learn no more and be trusted for ever."""
    if any(row[place] != matrix[place][column] for column, row in enumerate(matrix) for place in range(column)):
        return False
    lower: list[list[float]] = []
    for row in matrix:
        left = list[float]()
        for place, other in enumerate(lower):
            left.append((row[place] - _dot(left, other)) / other[place])
        rest = row[len(left)] - _dot(left, left)
        if not rest > 0.0:
            return False
        lower.append([*left, math.sqrt(rest)])
    return True


def _dot(left: list[float], right: list[float]) -> float:
    """As far as both go."""
    return sum(map(mul, left, right), 0.0)


@lru_cache
def _form_of(size: int) -> _Form:
    """For so many features: their sum by weights, and by a symmetric matrix their quadratic form, whose terms are its
    rows, one behind the other, each up to its diagonal and what is off it twice. A prediction is asked for some times
    in each plan, and written out it takes less time."""
    x, w = ([f"{name}{place}" for place in range(size)] for name in "xw")
    rows = [[f"t{row}_{column}" for column in range(row + 1)] for row in range(size)]
    terms = [term for row in rows for term in row]
    form = " + ".join(f"{x[place]} * ({_sum_of_products(row, x)})" for place, row in enumerate(rows))
    source = f"""
def form(features, weights, terms):
    {", ".join(x)}, = features
    {", ".join(w)}, = weights
    {", ".join(terms)}, = terms
    return {_sum_of_products(w, x)}, {form}
"""
    made: dict[str, object] = {}
    exec(source, made)
    return cast("_Form", made["form"])


def _sum_of_products(left: list[str], right: list[str]) -> str:
    return " + ".join(f"{each} * {other}" for each, other in zip(left, right, strict=False))
