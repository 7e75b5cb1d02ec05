"""The roofline, and the prior that is made of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cotenant.core.plan import (
    BatchShape,
    IterationRecord,
    JobView,
    Mode,
    Partition,
    RequestView,
    Slo,
    Snapshot,
    causal_pairs,
)
from cotenant.core.tasklet import TaskletKind, TaskletRun, TaskletShape
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.predictor.prior import ALLOWANCE, UNMEASURED, Prior
from cotenant.predictor.roofline import RATES, ModelSizes, Roofline, bandwidth_share, rates_by_clocks
from cotenant.scheduler import create_policy
from taught import in_turn

H200 = RATES["NVIDIA H200"]
SIZES = ModelSizes(32, 4096, 14336, 32, 8, 128, 128256, 2.0, 2.0)  # Llama-3.1-8B in bf16
ROOFLINE = Roofline(SIZES, H200)
SLOWER = 1.4  # than its roofline is the machine of these tests
WORK_KINDS = [kind for kind in TaskletKind if kind is not TaskletKind.OPTIMIZER]

batches = st.builds(
    lambda num, context, prompt: BatchShape(num, num * context, prompt, prompt),
    st.integers(1, 128),
    st.integers(1, 4000),
    st.sampled_from([0, 0, 100, 2000]),
)
tasklets = st.builds(TaskletShape, st.sampled_from(WORK_KINDS), st.integers(64, 8192), st.integers(64, 8192))


def test_a_decode_step_takes_what_was_measured_on_an_h200() -> None:
    """Decode steps of layers without a head, on so many SMs: batch, context, and milliseconds measured."""
    sizes = ModelSizes(32, 4096, 14336, 32, 8, 128, 1, 2.0, 2.0)
    roofline = Roofline(sizes, H200)
    for batch, measured in {
        BatchShape(32, 32 * 1024): {16: 14.8, 24: 11.0, 32: 8.7, 48: 7.2, 64: 6.0, 132: 5.5},
        BatchShape(8, 8 * 512): {16: 9.9, 24: 7.5, 32: 6.3, 48: 5.2, 64: 4.8, 132: 4.5},
    }.items():
        for num_sms, measured_ms in measured.items():
            assert roofline.batch_ms(batch, num_sms) == pytest.approx(measured_ms, rel=0.35)


@given(batch=batches, tasklet=tasklets, few=st.integers(1, 132), more=st.integers(0, 131))
def test_more_sms_are_never_slower(batch: BatchShape, tasklet: TaskletShape, few: int, more: int) -> None:
    many = min(132, few + more)
    assert ROOFLINE.batch_ms(batch, many) <= ROOFLINE.batch_ms(batch, few) * (1 + 1e-9)
    assert 0 < ROOFLINE.tasklet_ms(tasklet, many) <= ROOFLINE.tasklet_ms(tasklet, few) * (1 + 1e-9)
    assert ROOFLINE.batch_ms(batch, 132) == ROOFLINE.batch_ms(batch)


@given(share=st.floats(0.01, 1.0))
def test_bandwidth_needs_fewer_sms_than_arithmetic(share: float) -> None:
    assert share <= bandwidth_share(share) <= 1.0


@pytest.mark.parametrize(("name", "memory_bytes_per_s"), [("NVIDIA H200", 4.92e12), ("NVIDIA H100 80GB HBM3", 3.35e12)])
def test_rates_by_clocks_come_near_those_that_were_measured(name: str, memory_bytes_per_s: float) -> None:
    rates = rates_by_clocks((9, 0), 132, 1.98e9, memory_bytes_per_s)
    assert rates is not None
    assert rates.flops == pytest.approx(RATES[name].flops, rel=0.05)
    assert rates.bytes_per_s == pytest.approx(RATES[name].bytes_per_s, rel=0.05)


def test_rates_of_other_devices_are_a_share_of_their_data_sheets() -> None:
    for capability, num_sms, sm_hz, bytes_per_s, flops in (
        ((8, 0), 108, 1.41e9, 2.04e12, 312e12),  # A100
        ((8, 9), 142, 2.52e9, 0.86e12, 362e12),  # L40S
    ):
        rates = rates_by_clocks(capability, num_sms, sm_hz, bytes_per_s)
        assert rates is not None
        assert 0.7 * flops < rates.flops < 0.8 * flops
        assert 0.8 * bytes_per_s < rates.bytes_per_s < 0.9 * bytes_per_s
    assert rates_by_clocks((7, 2), 108, 1.41e9, 2.04e12) is None, "a capability that nobody knows"
    assert rates_by_clocks((8, 0), 108, 0.0, 2.04e12) is None, "a driver that tells no clock"


@given(batch=batches)
def test_where_nothing_was_measured_the_roofline_speaks_of_batches_on_all_sms_alone(batch: BatchShape) -> None:
    predictor, partition = LatencyPredictor("h", "m", Prior(ROOFLINE)), Partition(32, 100)
    assert predictor.batch_ms(batch) == pytest.approx(UNMEASURED * ROOFLINE.batch_ms(batch))
    assert predictor.batch_ms(batch, partition=partition) is None
    assert predictor.tasklet_ms(TaskletShape(TaskletKind.BACKWARD, 512, 512), partition=partition) is None
    other, other_ms = BatchShape(0, 0, 500, 500) if batch.prefill_tokens else BatchShape(200, 4000), 9.0
    for _ in range(3):
        predictor.observe(IterationRecord(other, Mode.NONE, other_ms, other_ms))
    by_other_ms = ROOFLINE.batch_ms(batch) * other_ms / ROOFLINE.batch_ms(other)
    assert predictor.batch_ms(batch) == pytest.approx(ALLOWANCE * by_other_ms), "what was measured corrects it"


def test_the_first_prompts_beside_running_requests_have_chunks_that_these_have_time_for() -> None:
    predictor, decodes = LatencyPredictor("h", "m", Prior(ROOFLINE)), BatchShape(8, 4000)
    for limit_ms in (20.0, 40.0):
        tokens = predictor.prompt_tokens_within(decodes, limit_ms, most=8192)
        assert tokens is not None
        batch = BatchShape(8, 4000, tokens, tokens, 0, causal_pairs(tokens))
        assert 0.8 * limit_ms < UNMEASURED * ROOFLINE.batch_ms(batch) < 1.1 * limit_ms
    assert LatencyPredictor("h", "m").prompt_tokens_within(decodes, 20.0, most=8192) is None


@pytest.mark.parametrize("limit_ms", [1e6, 1e9, 1e308, math.inf])
def test_a_batch_without_a_target_is_as_large_as_it_may_be_after_many_small_ones(limit_ms: float) -> None:
    predictor = LatencyPredictor("h", "m", Prior(ROOFLINE))
    for turn in range(2000):
        decodes = BatchShape(1 + turn % 8, 2000)
        batch = replace(decodes, prefill_tokens=250, prefill_context_tokens=250) if turn % 100 == 0 else decodes
        taken_ms = 1.2 * ROOFLINE.batch_ms(batch)
        predictor.observe(IterationRecord(batch, Mode.NONE, taken_ms, taken_ms))
    for most in (500, 8192):
        assert predictor.prompt_tokens_within(BatchShape(63, 129_000), limit_ms, most=most) == most


def test_where_the_host_takes_longer_than_any_roofline_prompts_are_not_thought_to_be_faster_than_decodes() -> None:
    small = Prior(Roofline(ModelSizes(16, 1024, 4096, 16, 4, 64, 32000, 2.0, 2.0), H200))
    predictor, decodes = LatencyPredictor("h", "m", small), BatchShape(8, 4000)
    with_prompts = BatchShape(8, 4000, 1024, 1024, 0, causal_pairs(1024))
    for num_measured in (3, 9):
        for _ in range(num_measured):
            predictor.observe(IterationRecord(decodes, Mode.NONE, 2.5, 2.5))
        predicted_ms = predictor.batch_ms(with_prompts)
        assert predicted_ms is not None
        assert predicted_ms >= 2.5
        assert predictor.prompt_tokens_within(decodes, 20.0, most=8192) is not None


@given(asked=batches, shape=tasklets, partition=st.sampled_from([Partition(16, 116), Partition(48, 84)]))
def test_one_shape_of_a_kind_corrects_the_prior_of_all(
    asked: BatchShape, shape: TaskletShape, partition: Partition
) -> None:
    """It errs on the side of late, by no more than half."""
    predictor = LatencyPredictor("h", "m", Prior(ROOFLINE))
    for batch in (BatchShape(8, 4000), BatchShape(0, 0, 500, 500)) * 3:
        alone_ms = SLOWER * ROOFLINE.batch_ms(batch)
        predictor.observe(IterationRecord(batch, Mode.NONE, alone_ms, alone_ms))
    measured = TaskletShape(shape.kind, 512, 512)
    each_ms = SLOWER * ROOFLINE.tasklet_ms(measured)
    for _ in range(3):
        predictor.observe(IterationRecord(BatchShape(), Mode.TEMPORAL, 0.0, 9.0, ((TaskletRun(measured, 1), each_ms),)))
    predicted = predictor.batch_ms(asked, partition=partition)
    assert predicted is not None
    assert 1.0 <= predicted / (SLOWER * ROOFLINE.batch_ms(asked, partition.online_sms)) <= 1.5
    beside = predictor.tasklet_ms(shape, partition=partition)
    assert beside is not None
    assert 1.0 <= beside / (SLOWER * ROOFLINE.tasklet_ms(shape, partition.best_effort_sms)) <= 1.6


def test_measured_co_runs_correct_what_the_other_tenant_costs() -> None:
    predictor, partition, batch = LatencyPredictor("h", "m", Prior(ROOFLINE)), Partition(32, 100), BatchShape(8, 4000)
    beside = ((TaskletRun(TaskletShape(TaskletKind.BACKWARD, 512, 512), 4), 8.0),)
    for factor, is_beside in [(1.2, False), (3.0, True)] * 3:
        step_ms = factor * ROOFLINE.batch_ms(batch, 32)
        mode, tasklets = (Mode.SPATIAL, beside) if is_beside else (Mode.NONE, ())
        predictor.observe(IterationRecord(batch, mode, step_ms, step_ms, partition=partition, beside=tasklets))
    asked, other = BatchShape(64, 64_000), Partition(48, 84)
    for factor, beside_training in ((1.2, False), (3.0, True)):
        predicted = predictor.batch_ms(asked, beside_training=beside_training, partition=other)
        assert predicted == pytest.approx(1.25 * factor * ROOFLINE.batch_ms(asked, 48))


def test_a_linear_model_gives_way_where_it_does_not_reach() -> None:
    """Steps of one batch size alone do not tell a row's cost from the step's own."""
    with_prior, without = LatencyPredictor("h", "m", Prior(ROOFLINE)), LatencyPredictor("h", "m")
    for context in range(100, 1000, 50):
        batch = BatchShape(2, 2 * context)
        step_ms = SLOWER * ROOFLINE.batch_ms(batch)
        for predictor in (with_prior, without):
            predictor.observe(IterationRecord(batch, Mode.NONE, step_ms, step_ms))
    large = BatchShape(100, 100_000)
    true_ms, guessed_ms = SLOWER * ROOFLINE.batch_ms(large), without.batch_ms(large)
    assert guessed_ms is not None
    assert guessed_ms > 1.5 * true_ms
    assert with_prior.batch_ms(large) == pytest.approx(1.25 * true_ms, rel=0.1)


def test_what_corrects_the_prior_can_be_taken_over() -> None:
    predictor, other = (LatencyPredictor("h", "m", Prior(ROOFLINE)) for _ in range(2))
    for _ in range(4):
        predictor.observe(IterationRecord(BatchShape(8, 4000), Mode.NONE, 9.0, 9.0))
    other.restore(predictor.export())
    asked = BatchShape(64, 64_000)
    assert other.batch_ms(asked) == predictor.batch_ms(asked) is not None
    LatencyPredictor("h", "m").restore(predictor.export())  # one without a prior has no use for it


@pytest.mark.parametrize("policy", ["multitask", "adaptive"])
def test_an_unknown_tasklet_is_tried_only_with_room_for_what_it_should_take(policy: str) -> None:
    predictor, batch = LatencyPredictor("h", "m", Prior(ROOFLINE)), BatchShape(8, 4000)
    for _ in range(3):
        predictor.observe(IterationRecord(batch, Mode.NONE, 5.0, 5.0))
    unknown = TaskletShape(TaskletKind.BACKWARD, 8192, 8192)
    assert 5.0 < predictor.first_tasklet_ms(unknown) < 15.0
    job = JobView("job", in_turn(TaskletRun(unknown, 4)))
    for tpot_ms, expected in ((8.0, 0), (40.0, 1)):
        running = RequestView("r", arrival_s=99.0, first_token_s=99.9, num_generated=40)
        snapshot = Snapshot(100.0, Slo(500.0, tpot_ms, itl_ms=max(10.0, tpot_ms)), batch, (running,), job)
        assert create_policy(policy, predictor).plan(snapshot).num_tasklets == expected
