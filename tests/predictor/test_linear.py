"""Linear models that go on learning for as long as a server runs."""

from __future__ import annotations

import random
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.predictor.linear import OnlineLinearModel

SCALES = (1.0, 8.0, 4096.0)
ASKED = ((1.0, 5.0, 2_000.0), (1.0, 40.0, 60_000.0), (1.0, 100.0, 50_000.0))


def truth(features: tuple[float, ...], speed: float = 1.0) -> float:
    return speed * (3.0 + 0.03 * features[1] + 3e-5 * features[2])


def step(rng: random.Random) -> tuple[float, ...]:
    num = rng.randint(1, 64)
    return (1.0, float(num), float(num * rng.randint(100, 2000)))


def worst_error(model: OnlineLinearModel, speed: float = 1.0) -> float:
    return max(abs(model.predict(features) - truth(features, speed)) / truth(features, speed) for features in ASKED)


@given(weights=st.lists(st.floats(0.1, 10), min_size=3, max_size=3), seed=st.integers(0, 1000))
def test_a_linear_truth_is_found(weights: list[float], seed: int) -> None:
    rng, model = random.Random(seed), OnlineLinearModel((1.0, 1.0, 1.0))
    for _ in range(50):
        features = (1.0, rng.uniform(0, 5), rng.uniform(0, 5))
        model.update(features, sum(weight * each for weight, each in zip(weights, features, strict=True)))
    assert model.predict((1.0, 2.0, 3.0)) == pytest.approx(weights[0] + 2 * weights[1] + 3 * weights[2], rel=1e-3)


def test_thousands_of_one_shape_take_nothing_away_and_the_model_still_learns() -> None:
    rng, model = random.Random(0), OnlineLinearModel(SCALES)

    def learn(count: int, speed: float = 1.0) -> None:
        for _ in range(count):
            features = step(rng)
            model.update(features, truth(features, speed) * rng.uniform(0.97, 1.03))

    learn(300)
    assert worst_error(model) < 0.02
    for _ in range(20_000):
        model.update((1.0, 8.0, 6000.0), truth((1.0, 8.0, 6000.0)) * rng.uniform(0.97, 1.03))
    assert worst_error(model) < 0.03
    assert all(model.reached(features) is not None for features in ASKED)
    learn(500, speed=2.0)
    assert worst_error(model, speed=2.0) < 0.15


def test_a_model_does_not_reach_where_no_measurement_has_told_its_weights() -> None:
    model = OnlineLinearModel(SCALES)
    for context in range(100, 2000, 50):
        features = (1.0, 4.0, 4.0 * context)
        model.update(features, truth(features))
    assert model.reached((1.0, 4.0, 6000.0)) == model.predict((1.0, 4.0, 6000.0)) > 0.0
    assert model.reached((1.0, 40.0, 60_000.0)) is None


@given(seed=st.integers(0, 1000), size=st.integers(1, 9), num_samples=st.integers(0, 20), scale=st.floats(0.1, 100.0))
def test_what_is_said_is_by_the_weights_and_the_covariance(
    seed: int, size: int, num_samples: int, scale: float
) -> None:
    """And features that are left off are 0, in what is asked and in what is learned."""
    rng = random.Random(seed)
    scales = tuple(scale * (1 + place) for place in range(size))
    model, padded = OnlineLinearModel(scales), OnlineLinearModel(scales)

    def features_of() -> tuple[float, ...]:
        return tuple(each * rng.uniform(-2.0, 2.0) for each in scales[: rng.randint(1, size)])

    for _ in range(num_samples):
        features, target = features_of(), rng.uniform(0.0, 10.0)
        model.update(features, target)
        padded.update((*features, *[0.0] * (size - len(features))), target)
    asked = features_of()
    weights, covariance, _ = model.state()
    assert padded.state() == model.state()
    x = [each / scale for each, scale in zip(asked, scales, strict=False)]
    rows = [covariance[start : start + len(x)] for start in range(0, size * len(x), size)]
    estimate = max(0.0, sum(weight * each for weight, each in zip(weights, x, strict=False)))
    variance = sum(each * sum(map(mul, row, x)) for each, row in zip(x, rows, strict=True))
    assert model.predict(asked) == pytest.approx(estimate, abs=1e-6)
    if num_samples <= size:
        assert model.reached(asked) is None
    elif abs(variance - 4.0) > 1e-3:  # in measurements: what a prediction may be off, to be one
        assert model.reached(asked) == (model.predict(asked) if variance < 4.0 else None)


def test_what_another_model_learned_can_be_taken_over() -> None:
    rng, model, other = random.Random(1), OnlineLinearModel(SCALES), OnlineLinearModel(SCALES)
    for _ in range(50):
        features = step(rng)
        model.update(features, truth(features))
    other.restore(model.state())
    assert all(other.predict(features) == model.predict(features) for features in ASKED)
    with pytest.raises(ValueError, match="2 features"):
        OnlineLinearModel(SCALES[:2]).restore(model.state())
    with pytest.raises(ValueError, match="3 features"):
        other.restore(model.state()._replace(weights=[1.0, float("nan"), 1.0]))
    with pytest.raises(ValueError, match="3 features"):
        other.restore(model.state()._replace(covariance=[0.0] * 9))
    frozen = [-1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1e4]  # of which it would learn no more
    lopsided = [1.0, 0.5, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    indefinite = [1.0, 2.0, 0.0, 2.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    for covariance in (frozen, lopsided, indefinite):
        with pytest.raises(ValueError):
            other.restore(model.state()._replace(covariance=covariance))


def test_after_hours_a_slope_that_changes_is_noticed_within_a_thousand_steps() -> None:
    """Contexts vary little against what a step takes in any case: what tells of their slope comes slowly."""
    rng, model = random.Random(0), OnlineLinearModel(SCALES, typical=10.0)

    def measure(per_token_ms: float) -> None:
        num = rng.choice((1, 2, 4, 8))
        context = float(num * rng.randrange(200, 4000))
        model.update((1.0, float(num), context), (6.0 + 0.05 * num + per_token_ms * context) * rng.gauss(1.0, 0.02))

    def worst(per_token_ms: float) -> float:
        places = [(float(num), float(num * context)) for num in (1, 8) for context in (200, 4000)]
        truths = [6.0 + 0.05 * num + per_token_ms * context for num, context in places]
        return max(
            abs(model.predict((1.0, *place)) / true_ms - 1) for place, true_ms in zip(places, truths, strict=True)
        )

    for _ in range(30_000):
        measure(1e-4)
    assert worst(1e-4) < 0.01
    for _ in range(1000):
        measure(2e-4)
    assert worst(2e-4) < 0.03


def test_what_is_not_measured_for_long_stays_in_reach() -> None:
    """Large batches, after thousands of small ones."""
    rng, model = random.Random(0), OnlineLinearModel(SCALES, typical=10.0)
    for _ in range(5):
        for num in (1, 2, 4, 8, 16, 32, 64):
            for context in (256, 1024, 4096):
                features = (1.0, float(num), float(num * context))
                model.update(features, truth(features))
    far = (1.0, 64.0, 64 * 4096.0)
    for _ in range(20_000):
        num = rng.randint(1, 2)
        features = (1.0, float(num), float(num * rng.randint(200, 2000)))
        model.update(features, truth(features) * rng.gauss(1.0, 0.02))
    assert model.reached(far) == pytest.approx(truth(far), rel=0.1)
