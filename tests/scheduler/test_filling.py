"""Tasklets of cycles are counted as if one looked at each of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.plan import BatchShape, IterationRecord, Mode, Partition
from cotenant.core.tasklet import TaskletCycle, TaskletKind, TaskletRun, TaskletShape, runs_of
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.scheduler.filling import Cost, Costs, CostTable, Filling, after, fill, take
from taught import DECODE, in_turn

KINDS = list(TaskletKind)
SHAPES = [TaskletShape(kind, 64) for kind in KINDS]
FORWARD = TaskletShape(TaskletKind.FORWARD, 64)
RUNS = st.builds(TaskletRun, st.sampled_from(SHAPES), st.integers(1, 4))
CYCLES = st.builds(TaskletCycle, st.lists(RUNS, min_size=1, max_size=4).map(tuple), st.integers(1, 6))
UPCOMING = st.lists(CYCLES, max_size=5).map(tuple)
# Eighths: sums are exact, and so whether one more fits.
EIGHTHS = st.integers(1, 40).map(lambda number: number / 8)
COSTS = st.lists(st.one_of(st.none(), EIGHTHS), min_size=len(SHAPES), max_size=len(SHAPES))


def one_by_one(upcoming: tuple[TaskletCycle, ...]) -> list[TaskletShape]:
    return [run.shape for run in runs_of(upcoming) for _ in range(run.count)]


@given(UPCOMING, COSTS, st.integers(0, 2000).map(lambda number: number / 8))
def test_as_many_are_taken_as_one_by_one(
    upcoming: tuple[TaskletCycle, ...], costs_ms: list[float | None], room_ms: float
) -> None:
    known = {
        shape: None if used_ms is None else Cost(used_ms, used_ms / 2, used_ms * 2)
        for shape, used_ms in zip(SHAPES, costs_ms, strict=True)
    }
    taken = take(upcoming, room_ms, CostTable(known.__getitem__))
    fitting, used_ms, stopped_at = 0, 0.0, None
    for shape in one_by_one(upcoming):
        cost = known[shape]
        if cost is None or used_ms + cost.used_ms > room_ms:
            stopped_at = shape
            break
        fitting, used_ms = fitting + 1, used_ms + cost.used_ms
    assert (taken.num_tasklets, taken.stopped_at) == (fitting, stopped_at)
    assert (taken.used_ms, taken.added_ms, taken.alone_ms) == (used_ms, used_ms / 2, used_ms * 2)
    assert taken.next_cost == (None if stopped_at is None else known[stopped_at])


@given(UPCOMING, st.integers(0, 500))
def test_what_is_left_is_what_was_not_taken(upcoming: tuple[TaskletCycle, ...], num_tasklets: int) -> None:
    table = CostTable(lambda shape: Cost(1.0, 1.0, 1.0))
    left = after(upcoming, num_tasklets, table)
    assert after(upcoming, num_tasklets, table) == left
    assert one_by_one(left) == one_by_one(upcoming)[num_tasklets:]
    assert all(cycle.count > 0 and cycle.runs for cycle in left)
    assert sum(cycle.num_tasklets for cycle in left) == max(0, len(one_by_one(upcoming)) - num_tasklets)


@given(UPCOMING.filter(bool), st.floats(0.01, 5.0), st.floats(0.0, 300.0))
def test_there_is_room_for_what_is_taken_and_for_no_more(
    upcoming: tuple[TaskletCycle, ...], each_ms: float, room_ms: float
) -> None:
    """Whatever rounding makes of sums."""
    taken = take(upcoming, room_ms, CostTable(lambda shape: Cost(each_ms, each_ms, each_ms)))
    assert taken.used_ms <= room_ms * (1 + 1e-9)
    assert (taken.stopped_at is None) == (taken.num_tasklets == len(one_by_one(upcoming)))
    if taken.stopped_at is not None:
        assert taken.used_ms + each_ms > room_ms * (1 - 1e-9) - 1e-9
    assert taken.used_ms == pytest.approx(taken.num_tasklets * each_ms)


@given(UPCOMING, st.integers(0, 400).map(lambda number: number / 8), st.booleans())
def test_forwards_in_front_are_inside_the_step(upcoming: tuple[TaskletCycle, ...], slack_ms: float, fuse: bool) -> None:
    """Inside a step a tasklet adds half of what it adds behind it."""
    leading = tuple(TaskletCycle((TaskletRun(FORWARD, 3),), 2) for _ in range(2))
    rest = tuple(cycle for cycle in upcoming if all(run.shape.kind is not TaskletKind.FORWARD for run in cycle.runs))
    filling = fill(Costs(taught(), DECODE), (*leading, *rest), slack_ms, fuse=fuse)
    count, added_ms = 0, 0.0
    for _ in one_by_one((*leading, *rest)):
        each_ms = 0.5 if fuse and count < 12 else 1.0
        if added_ms + each_ms > slack_ms:
            break
        count, added_ms = count + 1, added_ms + each_ms
    assert filling.num_tasklets == count
    assert filling.num_fused == (min(count, 12) if fuse else 0)
    assert filling.added_ms == pytest.approx(added_ms)
    assert filling.alone_ms == pytest.approx(count * 1.0)
    assert filling.is_all == (slack_ms > 0 and count == len(one_by_one((*leading, *rest))))


def taught(shapes: list[TaskletShape] = SHAPES) -> LatencyPredictor:
    """Each of these takes 1 ms, a forward inside a step half of that."""
    predictor = LatencyPredictor("hardware", "model")
    for _ in range(5):
        runs = tuple((TaskletRun(shape, 1), 1.0) for shape in shapes)
        predictor.observe(IterationRecord(DECODE, Mode.TEMPORAL, 2.0, 2.0, runs))
    for _ in range(5):
        predictor.observe(IterationRecord(DECODE, Mode.FUSED, 2.5, 2.5, fused=TaskletRun(FORWARD, 1)))
    return predictor


def test_a_shape_that_nobody_knows_is_tried_first_and_alone() -> None:
    others = [shape for shape in SHAPES if shape.kind is not TaskletKind.FORWARD]
    predictor, unknown = taught(others), TaskletShape(TaskletKind.FORWARD, 4096, 4096)
    costs, first = Costs(predictor, DECODE), in_turn(TaskletRun(unknown, 4), TaskletRun(SHAPES[1], 4))
    assert fill(costs, first, 10.0) == Filling(1, 0, 0.0, 0.0)
    assert fill(costs, first, 10.0, fuse=True) == Filling(1, 1, 0.0, 0.0)
    assert fill(costs, first, 0.0).num_tasklets == 0
    later = in_turn(TaskletRun(SHAPES[1], 4), TaskletRun(unknown, 4))
    assert fill(costs, later, 10.0) == Filling(4, 0, 4.0, 4.0)


def test_what_is_learned_between_plans_is_known_some_plans_later() -> None:
    """Alone, beside a batch, and on a partition that had not been tried."""
    predictor, partition = taught(), Partition(48, 84)
    costs, upcoming = Costs(predictor), in_turn(TaskletRun(SHAPES[0], 100))
    assert fill(costs.renew_for(DECODE), upcoming, 10.0).num_tasklets == 10
    assert costs.beside(partition) is None
    beside = (TaskletRun(SHAPES[0], 1), 4.0)
    for _ in range(200):
        predictor.observe(IterationRecord(DECODE, Mode.TEMPORAL, 2.0, 4.0, ((TaskletRun(SHAPES[0], 1), 2.0),)))
        predictor.observe(IterationRecord(DECODE, Mode.SPATIAL, 3.0, 3.0, partition=partition, beside=(beside,)))
    table = costs.beside(partition)
    assert table is not None
    assert take(upcoming, 10.0, table).num_tasklets == 2
    for _ in range(8):
        costs.renew_for(DECODE)
    assert fill(costs, upcoming, 11.0).num_tasklets == 5


def test_each_shape_of_batch_has_costs_of_its_own() -> None:
    predictor, other = taught(), BatchShape(32, 64_000)
    for _ in range(20):
        predictor.observe(IterationRecord(other, Mode.TEMPORAL, 2.0, 4.0, ((TaskletRun(SHAPES[0], 1), 2.0),)))
    costs, upcoming = Costs(predictor), in_turn(TaskletRun(SHAPES[0], 100))
    counts = [fill(costs.renew_for(batch), upcoming, 10.0).num_tasklets for batch in (DECODE, other, DECODE)]
    assert counts == [10, 5, 10]


def test_costs_of_shapes_that_are_gone_are_not_those_of_others() -> None:
    """New objects take the place of old ones, at the same address."""
    table = CostTable(lambda shape: Cost(shape.num_tokens, 0.0, 0.0))
    for num_tokens in range(1, 200):
        upcoming = (TaskletCycle((TaskletRun(TaskletShape(TaskletKind.FORWARD, num_tokens), 1),), 1),)
        assert take(upcoming, 1000.0, table).used_ms == num_tokens


def test_room_without_end_is_enough_for_all() -> None:
    upcoming = in_turn(TaskletRun(SHAPES[0], 4))
    assert fill(Costs(taught(), DECODE), upcoming, math.inf) == Filling(4, 0, 4.0, 4.0, is_all=True)


def test_without_room_nothing_is_taken() -> None:
    upcoming = (TaskletCycle((TaskletRun(SHAPES[0], 3),), 2),)
    for room_ms in (-5.0, 0.0, math.nextafter(1.0, 0.0)):
        assert take(upcoming, room_ms, CostTable(lambda shape: Cost(1.0, 1.0, 1.0))).num_tasklets == 0


def test_another_jobs_tasklets_of_the_same_shape_have_costs_of_their_own() -> None:
    predictor = taught()
    costs, upcoming = Costs(predictor), in_turn(TaskletRun(SHAPES[0], 100))
    for _ in range(3):
        assert fill(costs.renew_for(DECODE), upcoming, 10.0).num_tasklets == 10
    predictor.trains("r=64")
    for _ in range(20):
        predictor.observe(IterationRecord(DECODE, Mode.TEMPORAL, 2.0, 4.0, ((TaskletRun(SHAPES[0], 1), 2.0),)))
    assert fill(costs.renew_for(DECODE), upcoming, 10.0).num_tasklets == 5
