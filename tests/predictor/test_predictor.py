"""The predictor learns from iterations, and what was measured wins over what was fitted."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.config import POLICIES
from cotenant.core.plan import (
    BatchShape,
    InFlight,
    IterationRecord,
    JobView,
    Mode,
    Partition,
    RequestView,
    Slo,
    Snapshot,
)
from cotenant.core.tasklet import TaskletCycle, TaskletKind, TaskletRun, TaskletShape
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.scheduler import create_policy
from predictor.steps import decode, learn, true_ms
from taught import BACKWARD, DECODE, FORWARD, in_turn, taught_predictor


def test_nothing_is_known_at_first() -> None:
    predictor = LatencyPredictor("h", "m")
    assert predictor.batch_ms(decode(1, 10)) is None
    assert predictor.tasklet_ms(TaskletShape(TaskletKind.FORWARD, 256)) is None
    assert predictor.batch_ms(BatchShape()) == 0.0


def test_what_a_job_trains_has_times_of_its_own() -> None:
    """Those of another job's tell nothing of it once it was measured, and are still there when that job comes again."""
    predictor = LatencyPredictor("h", "m")
    shape = TaskletShape(TaskletKind.FORWARD, 256, 64)
    ranks = {f"r={rank}": each_ms for rank, each_ms in ((16, 1.0), (256, 1.6))}
    for trained, each_ms in ranks.items():
        predictor.trains(trained)
        for _ in range(20 if trained == "r=16" else 3):
            predictor.observe(
                IterationRecord(BatchShape(), Mode.TEMPORAL, 0.0, each_ms, ((TaskletRun(shape, 1), each_ms),))
            )
    restored = LatencyPredictor("h", "m")
    restored.restore(predictor.export())
    for each in (predictor, restored):
        for trained, each_ms in ranks.items():
            each.trains(trained)
            assert each.tasklet_ms(shape) == pytest.approx(each_ms, rel=0.05)


def test_the_linear_model_speaks_for_shapes_that_were_never_run() -> None:
    rng = random.Random(0)
    predictor = LatencyPredictor("h", "m")
    for _ in range(300):
        num = rng.randint(1, 32)
        batch = decode(num, num * rng.randint(10, 900))
        learn(predictor, batch, true_ms(batch) * rng.uniform(0.97, 1.03))
    for batch in (decode(40, 20_000), decode(3, 2_600), decode(20, 100)):
        assert predictor.batch_ms(batch) == pytest.approx(true_ms(batch), rel=0.15)


def adapters_ms(count: int) -> float:
    """As of 64 rows of an 8B model on an H200."""
    return 0.55 + 0.28 * count**0.5 if count else 0.0


def test_the_linear_model_knows_what_adapters_cost() -> None:
    rng = random.Random(0)
    predictor = LatencyPredictor("h", "m")
    for _ in range(300):
        num, adapters = rng.randint(1, 32), rng.choice((0, 0, 1, 2, 3, 4, 8))
        batch = decode(num, num * rng.randint(10, 900), adapters)
        learn(predictor, batch, (true_ms(batch) + adapters_ms(adapters)) * rng.uniform(0.99, 1.01))
    for adapters in (0, 1, 5, 16):
        for num, context in ((40, 20_000), (3, 2_600), (20, 100)):
            batch = decode(num, context, adapters)
            assert predictor.batch_ms(batch) == pytest.approx(true_ms(batch) + adapters_ms(adapters), rel=0.03)


def test_what_fits_beside_decodes_with_adapters_is_known_where_all_have_them() -> None:
    """A batch without any, which such a server never sees, tells nothing of it."""
    rng = random.Random(0)
    predictor = LatencyPredictor("h", "m")
    for _ in range(200):
        num, prompt = rng.randint(1, 32), rng.choice((0, 112, 496))  # of one tile or two, four or five
        batch = BatchShape(num, num * 400, prompt, prompt, num_adapters=4)
        learn(predictor, batch, true_ms(batch) + adapters_ms(4) + 0.02 * prompt)
    decodes = decode(16, 6400, adapters=4)
    alone_ms = true_ms(decodes) + adapters_ms(4)
    assert predictor.prompt_tokens_within(decodes, alone_ms + 10.0, most=8192) == pytest.approx(500, abs=5)


def test_a_measured_shape_wins_over_the_model() -> None:
    predictor = LatencyPredictor("h", "m")
    for num in range(1, 30):
        learn(predictor, decode(num, num * 100), true_ms(decode(num, num * 100)))
    odd = decode(8, 5000)
    for _ in range(10):
        learn(predictor, odd, 9.0)  # far from the line
    assert predictor.batch_ms(odd) == pytest.approx(9.0, rel=0.01)


def test_a_step_behind_tasklets_has_records_of_its_own() -> None:
    """It is timed from their end, and has begun before."""
    predictor, batch = LatencyPredictor("h", "m"), decode(4, 400)
    for _ in range(3):
        learn(predictor, batch, 4.0, behind_tasklets=True)
    assert predictor.batch_ms(batch) == predictor.batch_ms(batch, behind_tasklets=True) == 4.0, "about the same"
    for _ in range(3):
        learn(predictor, batch, 5.0)
    for _ in range(20):
        for step_ms, behind_tasklets in ((5.0, False), (4.0, True)):
            learn(predictor, batch, step_ms, behind_tasklets=behind_tasklets)
            assert predictor.last_error_ratio == 0.0
    restored = LatencyPredictor("h", "m")
    restored.restore(predictor.export())
    for each in (predictor, restored):
        assert (each.batch_ms(batch), each.batch_ms(batch, behind_tasklets=True)) == (5.0, 4.0)


@pytest.mark.parametrize("share_behind", [0.1, 0.9])
@pytest.mark.parametrize("less_ms_per_token", [0.0, 1 / 4_000])
def test_the_linear_model_knows_steps_behind_tasklets(share_behind: float, less_ms_per_token: float) -> None:
    """What they do beside the last of these is the more the longer they are. It takes nothing off steps alone."""
    rng, predictor = random.Random(0), LatencyPredictor("h", "m")

    def step_ms(batch: BatchShape, behind_tasklets: bool) -> float:
        less_ms = 0.5 + batch.context_tokens * less_ms_per_token
        return true_ms(batch) - (less_ms if behind_tasklets else 0.0)

    for _ in range(300):
        batch, behind_tasklets = decode(rng.randint(1, 32), rng.randint(100, 3000)), rng.random() < share_behind
        learn(predictor, batch, step_ms(batch, behind_tasklets), behind_tasklets=behind_tasklets)
    unseen = decode(41, 5000)
    for behind_tasklets in (False, True):
        known_ms = predictor.batch_ms(unseen, behind_tasklets=behind_tasklets)
        assert known_ms == pytest.approx(step_ms(unseen, behind_tasklets), rel=0.03 if less_ms_per_token else 0.01)


@pytest.mark.parametrize("partition", [None, Partition(48, 84)])
def test_what_many_tasklets_take_together_is_right_where_the_first_of_a_run_take_longer(
    partition: Partition | None,
) -> None:
    """Runs of a few are more often measured, and tell of fewer tasklets."""
    predictor, shape = LatencyPredictor("h", "m"), TaskletShape(TaskletKind.BACKWARD_UP, 2048, 2048)
    taken_ms = said_ms = 0.0
    for number in range(120):
        count = (1, 2, 12)[number % 3]
        run_ms = 0.5 + count
        runs = ((TaskletRun(shape, count), run_ms),)
        if partition is None:
            record = IterationRecord(BatchShape(), Mode.TEMPORAL, 0.0, run_ms, runs)
        else:
            record = IterationRecord(decode(4, 400), Mode.SPATIAL, 5.0, 5.0 + run_ms, (), None, partition, runs)
        if number > 60:
            each_ms = predictor.tasklet_ms(shape, partition=partition, cautious=False)
            assert each_ms is not None
            taken_ms, said_ms = taken_ms + run_ms, said_ms + count * each_ms
        predictor.observe(record)
    assert said_ms == pytest.approx(taken_ms, rel=0.05)


@pytest.mark.parametrize("first_ms", [0.5, 60.0])
def test_one_odd_step_behind_tasklets_is_not_what_all_take(first_ms: float) -> None:
    """Nor does it shift what is said of steps alone."""
    predictor, batch, unseen = LatencyPredictor("h", "m"), decode(4, 400), decode(9, 2000)
    rng = random.Random(0)
    for _ in range(100):
        each = decode(rng.randint(1, 32), rng.randint(100, 3000))
        learn(predictor, each, true_ms(each))
    for step_ms in (first_ms, *[true_ms(batch) - 0.2] * 4):
        learn(predictor, batch, step_ms, behind_tasklets=True)
        for behind_tasklets in (False, True):
            known_ms = predictor.batch_ms(unseen, behind_tasklets=behind_tasklets)
            assert known_ms == pytest.approx(true_ms(unseen), rel=0.25), (behind_tasklets, step_ms)


def test_where_all_steps_are_behind_tasklets_the_model_tells_of_them_alone() -> None:
    rng, predictor = random.Random(0), LatencyPredictor("h", "m")
    for _ in range(50):
        batch = decode(rng.randint(1, 32), rng.randint(100, 3000))
        learn(predictor, batch, true_ms(batch), behind_tasklets=True)
    for unseen in (decode(41, 5000), decode(8, 2000, adapters=1)):  # the second is a guess
        for behind_tasklets in (False, True):
            known_ms = predictor.batch_ms(unseen, behind_tasklets=behind_tasklets)
            assert known_ms == pytest.approx(true_ms(unseen), rel=0.05)


def test_plans_count_with_what_a_step_takes_behind_tasklets() -> None:
    """If it is going to wait for some: not where a batch is in flight before it, which has waited."""
    predictor, batch = LatencyPredictor("h", "m"), decode(1, 100)
    for _ in range(3):
        learn(predictor, batch, 5.0)
        learn(predictor, batch, 4.0, behind_tasklets=True)
        predictor.observe(IterationRecord(BatchShape(), Mode.TEMPORAL, 0.0, 1.0, ((TaskletRun(BACKWARD, 1), 1.0),)))
    requests = (RequestView("r", 0.0, 0.1, num_generated=5),)
    job = JobView("job", (TaskletCycle((TaskletRun(BACKWARD, 2),)),))
    for policy in ("adaptive", "multitask", "chunked", "llmstation", "harli"):
        plan = create_policy(policy, predictor).plan
        for tasklets_ms, with_job in ((0.0, None), (0.0 if policy == "harli" else 2.0, job)):
            alone = Snapshot(0.15, Slo(500.0, 40.0), batch, requests, with_job)
            behind = replace(alone, wait_ms=0.3)
            assert plan(alone).predicted_ms == 5.0 + tasklets_ms
            assert plan(behind).predicted_ms == 4.0 + tasklets_ms
            assert plan(replace(behind, in_flight=InFlight())).predicted_ms == 5.0 + tasklets_ms


def test_a_batch_with_adapters_has_records_of_its_own() -> None:
    predictor = LatencyPredictor("h", "m")
    for _ in range(10):
        learn(predictor, decode(4, 400), 2.0)
        learn(predictor, decode(4, 400, adapters=2), 3.0)
    assert predictor.batch_ms(decode(4, 400)) == pytest.approx(2.0)
    assert predictor.batch_ms(decode(4, 400, adapters=2)) == pytest.approx(3.0)


@given(st.integers(1, 1 << 20), st.floats(1.0, 3.0), st.floats(0.0, 1.0))
def test_what_was_measured_near_a_shape_is_found(least: int, width: float, place: float) -> None:
    predictor, most = LatencyPredictor("machine", "model"), int(least * width)
    assert not predictor.has_measured_decode(4, least, most)
    for _ in range(3):
        learn(predictor, decode(4, least + int(place * (most - least))), 5.0)
    assert predictor.has_measured_decode(4, least, most)
    assert not predictor.has_measured_decode(4, 2 * most + 16, 4 * most + 64)
    assert not predictor.has_measured_decode(5, least, most)
    assert not predictor.has_measured_decode(4, least, most, Partition(48, 84))


def test_prompts_of_all_lengths_displace_no_decode_steps() -> None:
    """There are more shapes with prompts than records."""
    predictor, rng = LatencyPredictor("machine", "model"), random.Random(0)
    for _ in range(3):
        learn(predictor, decode(4, 1000), 5.0)
    for _ in range(6000):
        batch = BatchShape(rng.randrange(64), rng.randrange(100_000), rng.randrange(1, 4096), rng.randrange(4096, 8192))
        runs = ((TaskletRun(BACKWARD, 1), 2.0),)
        predictor.observe(IterationRecord(batch, Mode.TEMPORAL, 5.0, 7.0, runs))
    assert predictor.num_records < 4200, "one kind's records at most, and a few"
    assert predictor.has_measured_decode(4, 1000, 1000)


def test_fused_tasklets_are_learned_as_what_they_add_to_the_step() -> None:
    predictor = LatencyPredictor("h", "m")
    batch, shape = decode(4, 400), TaskletShape(TaskletKind.FORWARD, 256, 64)
    for _ in range(10):
        learn(predictor, batch, 2.0)
    for _ in range(10):
        predictor.observe(IterationRecord(batch, Mode.FUSED, 5.0, 5.0, fused=TaskletRun(shape, 3)))
    assert predictor.batch_ms(batch) == pytest.approx(2.0)
    assert predictor.tasklet_ms(shape, with_batch=batch, fused=True) == pytest.approx(1.0)


def test_an_iteration_is_compared_with_what_was_expected_of_it() -> None:
    predictor = taught_predictor(2.0, 1.0, 3.0)
    assert predictor.last_error_ratio == pytest.approx(0.0, abs=1e-6)
    forward, backward = TaskletRun(FORWARD, 2), TaskletRun(BACKWARD, 1)
    predictor.observe(IterationRecord(DECODE, Mode.TEMPORAL, 3.0, 99.0, ((forward, 3.0), (backward, 2.0))))
    assert predictor.last_error_ratio == pytest.approx(abs(2.0 + 2 * 1.0 + 3.0 - 8.0) / 8.0)
    assert predictor.last_deviation_ratio == -predictor.last_error_ratio
    unknown = TaskletShape(TaskletKind.OPTIMIZER, 7)
    predictor.observe(IterationRecord(DECODE, Mode.TEMPORAL, 2.0, 3.0, ((TaskletRun(unknown, 1), 1.0),)))
    assert predictor.last_error_ratio is None


def test_errors_that_come_and_go_count_as_what_they_are_and_not_as_caution() -> None:
    """A planner counts with more than the mean; a prediction that is right on average is no worse for it."""
    predictor, errors = LatencyPredictor("h", "m"), list[float]()
    for turn in range(400):
        predictor.observe(IterationRecord(DECODE, Mode.NONE, 2.0 + 0.2 * (-1) ** turn, 2.0))
        errors.append(predictor.last_error_ratio or 0.0)
    assert predictor.batch_ms(DECODE) == pytest.approx(2.2, rel=0.02)
    assert statistics.mean(errors[-100:]) == pytest.approx(0.1, rel=0.15)


def test_work_that_a_model_says_takes_no_time_is_not_known() -> None:
    """Far from what was measured; a planner that divides by it would fail."""
    predictor = LatencyPredictor("test hardware", "test model")
    for turn in range(60):
        num = 1 + turn % 6
        predictor.observe(IterationRecord(decode(num, 100), Mode.NONE, 8.0 - num, 8.0 - num))
    assert predictor.batch_ms(decode(3, 100)) == pytest.approx(5.0)
    assert predictor.batch_ms(decode(200, 100)) is None
    job = JobView("job", in_turn(TaskletRun(BACKWARD, 4)))
    running = RequestView("r", arrival_s=99.0, first_token_s=99.9, num_generated=40)
    snapshot = Snapshot(100.0, Slo(100.0, 20.0), decode(200, 100), (running,), job)
    for policy in POLICIES:
        assert create_policy(policy, predictor).plan(snapshot).run_online
