"""Machines that change, pauses and stalls: how soon what was measured is believed, and for how long."""

from __future__ import annotations

import pytest

from cotenant.core.plan import BatchShape, IterationRecord, JobView, Mode, Partition, RequestView, Slo, Snapshot
from cotenant.core.tasklet import TaskletKind, TaskletRun, TaskletShape
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.predictor.records import STALE_AFTER, Record
from cotenant.scheduler import create_policy
from predictor.steps import decode, learn, true_ms
from taught import BACKWARD, DECODE, FORWARD, in_turn, taught_predictor


def test_a_machine_that_becomes_slower_is_noticed() -> None:
    predictor = LatencyPredictor("h", "m")
    for _ in range(200):
        learn(predictor, decode(4, 400), 2.0)
    for _ in range(40):
        learn(predictor, decode(4, 400), 4.0)
    assert predictor.batch_ms(decode(4, 400)) >= 3.9


def test_a_machine_that_becomes_faster_is_noticed() -> None:
    predictor = LatencyPredictor("h", "m")
    for _ in range(200):
        learn(predictor, decode(4, 400), 4.0)
    for _ in range(60):
        learn(predictor, decode(4, 400), 2.0)
    assert predictor.batch_ms(decode(4, 400)) <= 2.1


@pytest.mark.parametrize("policy", ["multitask", "adaptive"])
def test_a_tasklet_that_was_too_long_once_is_tried_again(policy: str) -> None:
    """Beside one batch tasklets were slow for a while, too slow to be planned there again; elsewhere they are not."""
    predictor, elsewhere = taught_predictor(2.0, 1.0, 3.0), decode(9, 4000)
    running = RequestView("r", arrival_s=99.0, first_token_s=99.9, num_generated=40)
    snapshot = Snapshot(100.0, Slo(100.0, 20.0), DECODE, (running,), JobView("job", in_turn(TaskletRun(BACKWARD, 4))))

    def run(batch: BatchShape, tasklet_ms: float) -> None:
        tasklets = ((TaskletRun(BACKWARD, 1), tasklet_ms),)
        predictor.observe(IterationRecord(batch, Mode.TEMPORAL, 2.0, 2.0 + tasklet_ms, tasklets))

    def planned() -> int:
        return create_policy(policy, predictor).plan(snapshot).num_tasklets

    assert planned() == 4
    for _ in range(40):
        run(DECODE, 90.0)
    assert planned() == 0
    for _ in range(11_000):
        run(elsewhere, 3.0)
    assert planned() == 4
    for _ in range(3):
        run(DECODE, 3.0)
    assert predictor.tasklet_ms(BACKWARD, with_batch=DECODE) == pytest.approx(3.0, rel=0.01)
    assert planned() == 4


@pytest.mark.parametrize("policy", ["multitask", "chunked", "llmstation", "adaptive"])
def test_a_tasklet_that_was_too_long_is_tried_again_where_requests_never_pause(policy: str) -> None:
    """Nothing else runs it meanwhile, so what is known of it alone is as old."""
    predictor = taught_predictor(2.0, 1.0, 3.0)
    running = RequestView("r", arrival_s=99.0, first_token_s=99.9, num_generated=40)
    snapshot = Snapshot(100.0, Slo(100.0, 20.0), DECODE, (running,), JobView("job", in_turn(TaskletRun(BACKWARD, 4))))

    def run(tasklet_ms: float, num_tasklets: int) -> None:
        tasklets = ((TaskletRun(BACKWARD, 1), tasklet_ms),) if num_tasklets else ()
        mode = Mode.TEMPORAL if num_tasklets else Mode.NONE
        predictor.observe(IterationRecord(DECODE, mode, 2.0, 2.0 + num_tasklets * tasklet_ms, tasklets))

    for _ in range(40):
        run(90.0, 1)
    trials, chosen = 0, create_policy(policy, predictor)
    for index in range(40_000):
        planned = chosen.plan(snapshot).num_tasklets if index % 50 == 0 else 0
        if planned > 1:
            break
        trials += planned
        run(3.0, planned)
    assert chosen.plan(snapshot).num_tasklets == 4
    assert trials == 3, "one each time that what was measured is old"


def test_a_stale_record_wins_as_long_as_nothing_contradicts_it() -> None:
    predictor = taught_predictor(2.0, 1.0, 3.0)
    for _ in range(11_000):
        learn(predictor, decode(9, 4000), 5.0)
    assert predictor.batch_ms(DECODE) == pytest.approx(2.0)
    assert predictor.tasklet_ms(BACKWARD, with_batch=DECODE) == pytest.approx(3.0)
    learn(predictor, DECODE, 2.1)
    assert predictor.batch_ms(DECODE) == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize("change", [0.5, 2.0])
def test_a_changed_machine_is_noticed_for_shapes_that_were_never_run(change: float) -> None:
    predictor = LatencyPredictor("h", "m")

    def train(speed: float) -> None:
        for num_tokens in (256, 512, 1024, 2048):
            shape, each_ms = TaskletShape(TaskletKind.BACKWARD, num_tokens, 256), speed * (0.1 + num_tokens / 500)
            predictor.observe(
                IterationRecord(BatchShape(), Mode.TEMPORAL, 0.0, 9.0, ((TaskletRun(shape, 1), each_ms),))
            )

    between = TaskletShape(TaskletKind.BACKWARD, 1500, 256)
    for _ in range(300):
        train(speed=1.0)
    assert predictor.tasklet_ms(between) == pytest.approx(3.1, rel=0.03)
    for _ in range(150):
        train(speed=change)
    assert predictor.tasklet_ms(between) == pytest.approx(3.1 * change, rel=0.12)


def test_one_frozen_second_does_not_become_the_expectation() -> None:
    record = Record(2.0)
    for _ in range(50):
        record.add(2.0)
    record.add(1000.0)
    assert record.mean_ms < 4.0


def test_one_frozen_second_does_not_rule_a_tasklet_out_where_it_is_new() -> None:
    predictor, batch = LatencyPredictor("h", "m"), decode(4, 256)
    shape = TaskletShape(TaskletKind.BACKWARD, 256, 64)
    learn(predictor, batch, 5.0)
    for _ in range(20):  # alone
        predictor.observe(IterationRecord(BatchShape(), Mode.TEMPORAL, 0.0, 3.0, ((TaskletRun(shape, 1), 3.0),)))
    for elapsed_ms in (3.0, 2000.0, 3.0):  # beside a batch
        predictor.observe(IterationRecord(batch, Mode.TEMPORAL, 5.0, 8.0, ((TaskletRun(shape, 1), elapsed_ms),)))
    expected_ms = predictor.tasklet_ms(shape, with_batch=batch)
    assert expected_ms is not None
    assert expected_ms < 30.0


def test_a_first_measurement_that_was_an_outlier_is_forgotten() -> None:
    """Training runs beside a batch only if it fits: a latency that is believed to be huge is not measured again."""
    for outlier_at in range(3):
        predictor = LatencyPredictor("h", "m")
        for turn in range(6):
            online_ms = 200.0 if turn == outlier_at else 5.0
            backward = ((TaskletRun(BACKWARD, 1), 100.0 if turn == outlier_at else 1.0),)
            predictor.observe(IterationRecord(DECODE, Mode.TEMPORAL, online_ms, 1.0, backward))
        step_ms, tasklet_ms = predictor.batch_ms(DECODE), predictor.tasklet_ms(BACKWARD)
        assert step_ms is not None
        assert tasklet_ms is not None
        assert step_ms < 40
        assert tasklet_ms < 8


def test_a_pause_teaches_the_model_of_batches_little() -> None:
    predictor = LatencyPredictor("h", "m")
    for turn in range(300):
        step_ms = 2.0 + 0.05 * (turn % 8) + 0.001 * (100 + turn % 50)
        predictor.observe(IterationRecord(decode(turn % 8 + 1, 100 + turn % 50), Mode.NONE, step_ms, step_ms))
    before = predictor.batch_ms(decode(20, 300))
    predictor.observe(IterationRecord(decode(3, 120), Mode.NONE, 2000.0, 2000.0))
    after = predictor.batch_ms(decode(20, 300))
    assert before is not None
    assert after is not None
    assert after < 2 * before


def test_turns_that_find_nothing_to_do_age_nothing() -> None:
    """A worker that nobody asks looks about some twenty times a second."""
    predictor = LatencyPredictor("h", "m")
    there, shape = Partition(48, 84), TaskletRun(FORWARD, 1)
    steps = [decode(num, 1000 * num) for num in range(1, 9)]
    for _ in range(20):
        for batch in steps:
            learn(predictor, batch, true_ms(batch))
            together = IterationRecord(batch, Mode.SPATIAL, 5.0, 5.0, partition=there, beside=((shape, 2.0),))
            predictor.observe(together)
    learn(predictor, steps[0], 3 * true_ms(steps[0]))  # now it is nothing that a line says

    def said() -> list[float | bool | None]:
        beside = [predictor.batch_ms(batch, beside_training=True, partition=there) for batch in steps]
        return [*map(predictor.batch_ms, steps), *beside, predictor.was_tried(there)]

    before = said()
    for _ in range(2 * STALE_AFTER):
        predictor.observe(IterationRecord(BatchShape(), Mode.NONE, 0.0, 0.0))
    assert said() == before


def test_a_step_with_a_tasklet_of_the_one_before_teaches_nothing() -> None:
    """It has begun on a part of the SMs. What was expected of it was wrong all the same."""
    predictor, batch = LatencyPredictor("h", "m"), decode(4, 1000)
    for _ in range(20):
        learn(predictor, batch, 10.0)
    for _ in range(20):
        predictor.observe(IterationRecord(batch, Mode.TEMPORAL, 12.5, 12.5, with_tasklet=True))
        assert predictor.last_error_ratio == pytest.approx(0.2)
    assert predictor.batch_ms(batch) == pytest.approx(10.0)


def test_what_seemed_to_take_nothing_inside_a_step_does_not_so_for_ever() -> None:
    predictor, batch, run = LatencyPredictor("h", "m"), decode(4, 1000), TaskletRun(FORWARD, 1)
    for _ in range(5):
        learn(predictor, batch, 10.0)
    for online_ms in (9.9, 9.8, *[14.0] * 40):  # two that were no longer than the step was expected to be
        predictor.observe(IterationRecord(batch, Mode.FUSED, online_ms, online_ms, fused=run))
    assert predictor.tasklet_ms(FORWARD, with_batch=batch, fused=True) == pytest.approx(4.0, rel=0.1)
