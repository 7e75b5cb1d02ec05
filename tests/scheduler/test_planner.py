"""Equation 1 and what is planned with it."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.plan import IterationRecord, Mode
from cotenant.core.tasklet import TaskletKind, TaskletRun, TaskletShape
from cotenant.predictor.predictor import CoRun
from cotenant.predictor.records import MIN_COUNT
from cotenant.scheduler.planner import plan_tasklets, tasklet_budget
from taught import BACKWARD, DECODE, FORWARD, in_turn, taught_predictor


def test_equation_1_of_the_paper_on_figures_worked_by_hand() -> None:
    # Ten decode steps of 4 ms in 100 ms leave 60 ms. Beside training a step takes 6 ms, so 30 of them could be slowed
    # down, which is 180 ms of co-running; a tasklet takes 3 ms of it.
    assert tasklet_budget(100.0, 10, CoRun(4.0, 6.0, 3.0)) == 60


def test_no_budget_without_spare_time() -> None:
    assert tasklet_budget(40.0, 10, CoRun(4.0, 6.0, 3.0)) == 0
    assert tasklet_budget(39.0, 10, CoRun(4.0, 6.0, 3.0)) == 0


def test_tasklets_that_cost_nothing_still_end_in_time() -> None:
    assert tasklet_budget(40.0, 1, CoRun(4.0, 4.0, 8.0)) == 5


@given(step=st.floats(0.1, 50), added=st.floats(0.01, 50), slack=st.floats(0, 500))
def test_sequential_tasklets_fit_the_slack_and_one_more_would_not(step: float, added: float, slack: float) -> None:
    count = tasklet_budget(slack + step, 1, CoRun(step, step + added, step + added))
    assert count * added <= slack * (1 + 1e-6) + 1e-6
    assert (count + 1) * added > slack * (1 - 1e-6) - 1e-6
    assert count == math.floor(count)


def test_a_plan_crosses_from_forward_into_backward_within_the_slack() -> None:
    predictor = taught_predictor(step_ms=2.0, forward_ms=1.0, backward_ms=2.0)
    upcoming = in_turn(TaskletRun(FORWARD, 3), TaskletRun(BACKWARD, 6))
    count, num_fused, added_ms = plan_tasklets(predictor, DECODE, upcoming, slack_ms=8.0)
    assert (count, num_fused) == (5, 0)  # 3 × 1 ms + 2 × 2 ms
    assert math.isclose(added_ms, 7.0, rel_tol=0.05)


def test_an_unknown_shape_is_tried_once_and_only_with_slack() -> None:
    predictor = taught_predictor(step_ms=2.0, forward_ms=1.0, backward_ms=2.0)
    unknown = in_turn(TaskletRun(TaskletShape(TaskletKind.LOSS, 256, 64), 1), TaskletRun(BACKWARD, 6))
    assert plan_tasklets(predictor, DECODE, unknown, slack_ms=8.0)[0] == 1
    assert plan_tasklets(predictor, DECODE, unknown, slack_ms=-1.0)[0] == 0


def test_only_leading_forward_layers_are_fused() -> None:
    predictor = taught_predictor(step_ms=2.0, forward_ms=1.0, backward_ms=2.0)
    upcoming = in_turn(TaskletRun(FORWARD, 3), TaskletRun(BACKWARD, 6))
    for _ in range(MIN_COUNT):
        assert plan_tasklets(predictor, DECODE, upcoming, slack_ms=8.0, fuse=True)[:2] == (1, 1), "not known yet"
        predictor.observe(IterationRecord(DECODE, Mode.FUSED, 3.0, 3.0, fused=TaskletRun(FORWARD, 1)))
    assert plan_tasklets(predictor, DECODE, upcoming, slack_ms=8.0, fuse=True)[:2] == (5, 3)
    assert plan_tasklets(predictor, DECODE, upcoming[1:], slack_ms=8.0, fuse=True)[:2] == (4, 0)
