"""A place in a micro-batch's tasklets tells what is left of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.tasklet import TaskletCycle, TaskletKind, TaskletRun, TaskletShape, runs_of
from cotenant.finetune.tasklets import Cursor

SHAPES = st.builds(TaskletShape, st.sampled_from(TaskletKind), st.integers(1, 3))
RUNS = st.lists(st.builds(TaskletRun, SHAPES, st.integers(1, 3)), min_size=1, max_size=3).map(tuple)
CYCLES = st.lists(st.builds(TaskletCycle, RUNS, st.integers(1, 3)), min_size=1, max_size=4).map(tuple)


def shapes_of(cycles: tuple[TaskletCycle, ...]) -> list[TaskletShape]:
    return [run.shape for run in runs_of(cycles) for _ in range(run.count)]


@given(CYCLES)
def test_what_is_left_are_those_that_come(cycles: tuple[TaskletCycle, ...]) -> None:
    cursor, left = Cursor(cycles), shapes_of(cycles)
    while left:
        assert shapes_of(cursor.remaining) == left
        assert (cursor.shape, cursor.is_last) == (left[0], len(left) == 1)
        left.pop(0)
        cursor.advance()
    assert cursor.done
    assert cursor.remaining == ()


@given(CYCLES)
def test_equal_micro_batches_have_the_same_objects(cycles: tuple[TaskletCycle, ...]) -> None:
    """By which planning finds again what it knows of them."""
    copied = tuple(TaskletCycle(tuple(TaskletRun(*of) for of in fields(cycle)), cycle.count) for cycle in cycles)
    one, other = Cursor(cycles), Cursor(copied)
    while not one.done:
        pairs = zip(one.remaining, other.remaining, strict=True)
        assert all(left.runs is right.runs for left, right in pairs)
        one.advance()
        other.advance()


def fields(cycle: TaskletCycle) -> list[tuple[TaskletShape, int]]:
    return [(TaskletShape(*run.shape), run.count) for run in cycle.runs]
