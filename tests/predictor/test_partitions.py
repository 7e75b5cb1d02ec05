"""Prediction on partitions of the SMs: Harli's two stages, behind records, apart from what is known of all SMs."""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cotenant.core.plan import BatchShape, IterationRecord, Mode, Partition
from cotenant.core.tasklet import TaskletKind, TaskletRun, TaskletShape
from cotenant.predictor.predictor import LatencyPredictor
from taught import BACKWARD, DECODE, FORWARD, taught_predictor

NUM_SMS = 132
PARTITIONS = [Partition(online, NUM_SMS - online) for online in (16, 24, 32, 48, 64)]
SMALL = Partition(32, 100)


class Machine:
    """Steps follow Equations 2 and 3, with noise."""

    def __init__(self, seed: int, noise: float) -> None:
        self._random, self._noise = random.Random(seed), noise
        self._fixed_ms, self._row_ms = self._random.uniform(2, 6), self._random.uniform(0.01, 0.06)
        self._entry_ms = self._random.uniform(2e-5, 1e-4)
        self._online, self._best_effort = self._random.uniform(1.1, 1.5), self._random.uniform(1.1, 1.3)

    def alone_ms(self, batch: BatchShape, online_sms: int) -> float:
        on_all = self._fixed_ms + self._row_ms * batch.num_decode + self._entry_ms * batch.context_tokens
        return on_all * (0.7 + 0.3 * NUM_SMS / online_sms)

    def together_ms(self, batch: BatchShape, partition: Partition) -> float:
        online, best_effort = partition.online_sms / NUM_SMS, partition.best_effort_sms / NUM_SMS
        return self.alone_ms(batch, partition.online_sms) * (self._online * online + self._best_effort * best_effort)

    def noisy(self, latency_ms: float) -> float:
        return latency_ms * self._random.uniform(1 - self._noise, 1 + self._noise)

    def batch(self) -> BatchShape:
        num = self._random.randint(1, 96)
        return BatchShape(num, num * self._random.randint(200, 2000))


def alone(predictor: LatencyPredictor, batch: BatchShape, partition: Partition, latency_ms: float) -> None:
    predictor.observe(IterationRecord(batch, Mode.NONE, latency_ms, latency_ms, partition=partition))


def together(
    predictor: LatencyPredictor, batch: BatchShape, partition: Partition, latency_ms: float, tasklet_ms: float = 1.0
) -> None:
    beside = ((TaskletRun(BACKWARD, 2), 2 * tasklet_ms),)
    predictor.observe(IterationRecord(batch, Mode.SPATIAL, latency_ms, latency_ms, partition=partition, beside=beside))


def mean_error(predicted_and_true: Iterable[tuple[float | None, float]]) -> float:
    errors = []
    for predicted, true in predicted_and_true:
        assert predicted is not None
        errors.append(abs(predicted - true) / true)
    return statistics.fmean(errors)


@given(seed=st.integers(0, 10_000))
def test_two_stages_predict_what_was_never_run_after_three_batch_sizes(seed: int) -> None:
    machine, predictor = Machine(seed, noise=0.02), LatencyPredictor("h", "m")
    profiled = [BatchShape(num, num * context) for num in (4, 32, 96) for context in (300, 1500)]
    for partition in PARTITIONS:
        for batch in profiled * 2:
            alone(predictor, batch, partition, machine.noisy(machine.alone_ms(batch, partition.online_sms)))
    for partition in (PARTITIONS[0], PARTITIONS[-1]):
        for batch in profiled:
            together(predictor, batch, partition, machine.noisy(machine.together_ms(batch, partition)))
    asked = [(partition, machine.batch()) for partition in PARTITIONS for _ in range(10)]
    alone_errors = (
        (predictor.batch_ms(batch, partition=each), machine.alone_ms(batch, each.online_sms)) for each, batch in asked
    )
    assert mean_error(alone_errors) <= 0.03
    together_errors = (
        (predictor.batch_ms(batch, beside_training=True, partition=each), machine.together_ms(batch, each))
        for each, batch in asked
    )
    assert mean_error(together_errors) <= 0.05


@given(seed=st.integers(0, 10_000))
def test_a_partition_that_is_never_without_tasklets_is_predicted_too(seed: int) -> None:
    machine, predictor = Machine(seed, noise=0.02), LatencyPredictor("h", "m")
    for _ in range(40):
        batch = machine.batch()
        together(predictor, batch, SMALL, machine.noisy(machine.together_ms(batch, SMALL)))
    asked = [machine.batch() for _ in range(10)]
    assert (
        mean_error(
            (predictor.batch_ms(batch, beside_training=True, partition=SMALL), machine.together_ms(batch, SMALL))
            for batch in asked
        )
        <= 0.05
    )


@given(seed=st.integers(0, 10_000))
def test_a_step_that_tasklets_were_always_beside_is_known_without_them_too(seed: int) -> None:
    """It happens as a training step ends. Of other partitions it is known what tasklets cost a step."""
    machine, predictor = Machine(seed, noise=0.02), LatencyPredictor("h", "m")
    for partition in PARTITIONS * 24:
        batch = machine.batch()
        together(predictor, batch, partition, machine.noisy(machine.together_ms(batch, partition)))
        if partition != SMALL:
            alone(predictor, batch, partition, machine.noisy(machine.alone_ms(batch, partition.online_sms)))
    asked = [machine.batch() for _ in range(10)]
    predicted = [predictor.batch_ms(batch, partition=SMALL) for batch in asked]
    taken = [machine.alone_ms(batch, SMALL.online_sms) for batch in asked]
    assert mean_error(zip(predicted, taken, strict=True)) <= 0.05


@given(seed=st.integers(0, 10_000))
def test_what_adapters_cost_is_known_on_partitions_too(seed: int) -> None:
    rng, machine, predictor = random.Random(seed), Machine(seed, noise=0.01), LatencyPredictor("h", "m")

    def true_ms(batch: BatchShape) -> float:
        return machine.together_ms(batch, SMALL) + (0.6 + 0.3 * batch.num_adapters**0.5 if batch.num_adapters else 0.0)

    for _ in range(60):
        batch = replace(machine.batch(), num_adapters=rng.choice((0, 1, 2, 4, 8)))
        together(predictor, batch, SMALL, machine.noisy(true_ms(batch)))
    asked = [replace(machine.batch(), num_adapters=num) for num in (0, 1, 3, 6) for _ in range(3)]
    predicted = [predictor.batch_ms(batch, beside_training=True, partition=SMALL) for batch in asked]
    assert mean_error(zip(predicted, map(true_ms, asked), strict=True)) <= 0.02


def test_a_measured_shape_wins_over_both_stages() -> None:
    machine, predictor = Machine(1, noise=0.0), LatencyPredictor("h", "m")
    for _ in range(60):
        batch = machine.batch()
        alone(predictor, batch, SMALL, machine.alone_ms(batch, SMALL.online_sms))
        together(predictor, batch, SMALL, machine.together_ms(batch, SMALL))
    for _ in range(4):
        alone(predictor, DECODE, SMALL, 50.0)
        together(predictor, DECODE, SMALL, 70.0)
    assert predictor.batch_ms(DECODE, partition=SMALL) == pytest.approx(50.0)
    assert predictor.batch_ms(DECODE, beside_training=True, partition=SMALL) == pytest.approx(70.0)


def test_one_shape_says_nothing_of_others() -> None:
    predictor = LatencyPredictor("h", "m")
    for _ in range(20):
        alone(predictor, DECODE, SMALL, 5.0)
    assert predictor.batch_ms(BatchShape(64, 64_000), partition=SMALL) is None
    assert predictor.batch_ms(DECODE, partition=Partition(48, 84)) is None


def test_until_a_co_run_was_measured_the_other_tenant_is_not_taken_to_be_free() -> None:
    predictor = LatencyPredictor("h", "m")
    for _ in range(5):
        alone(predictor, DECODE, SMALL, 8.0)
    predicted = predictor.batch_ms(DECODE, beside_training=True, partition=SMALL)
    assert predicted is not None
    assert predicted > 8.0 * 1.2


measured = st.tuples(
    st.builds(
        BatchShape, st.integers(1, 40), st.integers(0, 60_000), st.integers(0, 500), num_adapters=st.integers(0, 1)
    ),
    st.sampled_from(PARTITIONS),
    st.floats(0.1, 500),
    st.booleans(),
)


@given(records=st.lists(measured, max_size=30))
def test_what_is_measured_on_partitions_changes_nothing_of_all_sms(
    records: list[tuple[BatchShape, Partition, float, bool]],
) -> None:
    shapes, tasklets = [DECODE, BatchShape(7, 9000), BatchShape(3, 40, 200, 200)], [FORWARD, BACKWARD]
    predictor, other = taught_predictor(2.0, 1.0, 3.0), taught_predictor(2.0, 1.0, 3.0)
    for batch, partition, latency_ms, is_alone in records:
        (alone if is_alone else together)(predictor, batch, partition, latency_ms)
    for shape in shapes:
        assert predictor.batch_ms(shape) == other.batch_ms(shape)
    for tasklet in tasklets:
        for batch in (None, *shapes):
            assert predictor.tasklet_ms(tasklet, with_batch=batch) == other.tasklet_ms(tasklet, with_batch=batch)


def test_a_tasklet_on_a_partition_is_known_by_others_on_as_many_sms() -> None:
    predictor = taught_predictor(2.0, 1.0, 3.0)
    assert predictor.tasklet_ms(FORWARD, partition=SMALL) is None
    for _ in range(5):
        together(predictor, DECODE, SMALL, 3.0, tasklet_ms=6.0)
    assert predictor.tasklet_ms(BACKWARD, partition=SMALL) == pytest.approx(6.0)
    assert predictor.tasklet_ms(FORWARD, partition=Partition(16, 100)) == pytest.approx(2.0)
    assert predictor.tasklet_ms(FORWARD, partition=Partition(48, 84)) is None


def test_tasklets_behind_a_partitions_batch_are_on_all_sms() -> None:
    predictor, shape = LatencyPredictor("h", "m"), TaskletShape(TaskletKind.LOSS, 256)
    for _ in range(5):
        predictor.observe(
            IterationRecord(DECODE, Mode.SPATIAL, 4.0, 6.0, ((TaskletRun(shape, 1), 2.0),), partition=SMALL, beside=())
        )
    assert predictor.tasklet_ms(shape) == pytest.approx(2.0)
    assert predictor.batch_ms(DECODE, partition=SMALL) is None, "the batch was not alone"


def test_spatial_iterations_are_compared_with_what_was_expected_of_them() -> None:
    predictor, shape = LatencyPredictor("h", "m"), TaskletShape(TaskletKind.FORWARD_MLP, 512, 512)
    beside = ((TaskletRun(shape, 2), 4.0),)
    for _ in range(100):
        predictor.observe(IterationRecord(DECODE, Mode.SPATIAL, 4.0, 5.0, partition=SMALL, beside=beside))
    assert predictor.last_error_ratio == pytest.approx(0.0, abs=1e-6)
    predictor.observe(
        IterationRecord(DECODE, Mode.SPATIAL, 5.0, 5.0, partition=SMALL, beside=((TaskletRun(shape, 1), 3.0),))
    )
    assert predictor.last_deviation_ratio == pytest.approx((6.0 - 8.0) / 8.0)


def test_a_batch_whose_time_tells_nothing_teaches_nothing() -> None:
    for partition in (None, SMALL):
        predictor = LatencyPredictor("h", "m")
        for _ in range(10):
            together(predictor, DECODE, SMALL, 9.0)
            predictor.observe(IterationRecord(DECODE, Mode.NONE, 5.0, 5.0))
        before = predictor.num_records
        record = IterationRecord(DECODE, Mode.SPATIAL, 40.0, 40.0, partition=partition, is_disturbed=True)
        for _ in range(10):
            predictor.observe(record)
        assert (predictor.num_records, predictor.last_error_ratio) == (before, None)
        assert predictor.batch_ms(DECODE) == pytest.approx(5.0)
        assert predictor.batch_ms(DECODE, beside_training=True, partition=SMALL) == pytest.approx(9.0)


def test_a_partition_that_was_not_used_for_long_is_tried_anew() -> None:
    """Its trials may have been disturbed: what they say holds for some minutes, and then the next ones say it."""
    predictor = LatencyPredictor("h", "m")
    for _ in range(5):
        together(predictor, DECODE, SMALL, 30.0)
    assert predictor.was_tried(SMALL)
    for _ in range(10_100):
        predictor.observe(IterationRecord(DECODE, Mode.TEMPORAL, 5.0, 5.0))
    assert not predictor.was_tried(SMALL)
    for _ in range(5):
        assert predictor.was_tried(SMALL) is False
        together(predictor, DECODE, SMALL, 9.0)
    assert predictor.was_tried(SMALL)
    assert predictor.batch_ms(DECODE, beside_training=True, partition=SMALL) == pytest.approx(9.0)


def test_batches_with_prompts_are_no_trials_of_decode_steps() -> None:
    """`static` runs them in its partition."""
    predictor, prompts = LatencyPredictor("h", "m"), BatchShape(8, 8_000, 64, 64, prefill_pairs=2_080)
    for _ in range(5):
        together(predictor, prompts, SMALL, 9.0)
    assert not predictor.was_tried(SMALL)
    for _ in range(5):
        together(predictor, DECODE, SMALL, 9.0)
    assert predictor.was_tried(SMALL)
    for _ in range(10_100):
        together(predictor, prompts, SMALL, 9.0)
    assert not predictor.was_tried(SMALL), "for long none was"


def test_what_was_learned_of_partitions_can_be_taken_over() -> None:
    machine, predictor = Machine(3, noise=0.01), taught_predictor(2.0, 1.0, 3.0)
    for _ in range(40):
        batch = machine.batch()
        for partition in PARTITIONS:
            alone(predictor, batch, partition, machine.noisy(machine.alone_ms(batch, partition.online_sms)))
            together(predictor, batch, partition, machine.noisy(machine.together_ms(batch, partition)))
    other = LatencyPredictor("test hardware", "test model")
    assert other.restore(predictor.export()) == predictor.num_records
    for partition in PARTITIONS:
        for batch in (DECODE, machine.batch()):
            for beside_training in (False, True):
                predicted = other.batch_ms(batch, beside_training=beside_training, partition=partition)
                expected = predictor.batch_ms(batch, beside_training=beside_training, partition=partition)
                assert predicted == pytest.approx(expected)
        for tasklet in (FORWARD, BACKWARD):
            known = predictor.tasklet_ms(tasklet, partition=partition)
            assert other.tasklet_ms(tasklet, partition=partition) == pytest.approx(known)


def test_of_an_export_that_is_refused_nothing_is_taken() -> None:
    exported = taught_predictor(2.0, 1.0, 3.0).export()
    for right, wrong in ((b'"forward":', b'"nonsense":'), (b'"prior_ratios"', b'"prior_rations"')):
        predictor = LatencyPredictor("test hardware", "test model")
        with pytest.raises(ValueError):
            predictor.restore(exported.replace(right, wrong, 1))
        assert predictor.num_records == 0
        assert predictor.batch_ms(DECODE) is None


def test_an_export_of_another_version_is_passed_over() -> None:
    exported = re.sub(rb'"version":\d+', b'"version":9', taught_predictor(2.0, 1.0, 3.0).export())
    with pytest.raises(ValueError, match="version 9"):
        LatencyPredictor("test hardware", "test model").restore(exported)


def test_a_partition_that_was_too_slow_once_is_tried_again() -> None:
    machine, predictor = Machine(5, noise=0.0), LatencyPredictor("h", "m")
    true_ms = machine.together_ms(DECODE, SMALL)
    for _ in range(20):
        together(predictor, DECODE, SMALL, 10 * true_ms)
    for _ in range(11_000):
        batch = machine.batch()
        together(predictor, batch, SMALL, machine.together_ms(batch, SMALL))
    assert predictor.batch_ms(DECODE, beside_training=True, partition=SMALL) == pytest.approx(true_ms, rel=0.05)
