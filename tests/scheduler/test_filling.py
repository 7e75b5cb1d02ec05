"""Tasklets of cycles are counted as if one looked at each of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.tasklet import TaskletCycle, TaskletKind, TaskletRun, TaskletShape, runs_of
from cotenant.scheduler.filling import Cost, CostTable, after, take

KINDS = list(TaskletKind)
SHAPES = [TaskletShape(kind, 64) for kind in KINDS]
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
    left = after(upcoming, num_tasklets)
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
    if taken.stopped_at is not None:
        assert taken.used_ms + each_ms > room_ms * (1 - 1e-9) - 1e-9
    assert taken.used_ms == pytest.approx(taken.num_tasklets * each_ms)


def test_without_room_nothing_is_taken() -> None:
    upcoming = (TaskletCycle((TaskletRun(SHAPES[0], 3),), 2),)
    for room_ms in (-5.0, 0.0, math.nextafter(1.0, 0.0)):
        assert take(upcoming, room_ms, CostTable(lambda shape: Cost(1.0, 1.0, 1.0))).num_tasklets == 0
