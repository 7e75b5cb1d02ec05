"""How many tasklets fit beside a decode step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from cotenant.core.plan import BatchShape, Mode, Plan, Snapshot
from cotenant.core.tasklet import TaskletKind, TaskletRun, TaskletShape
from cotenant.predictor.predictor import CoRun, LatencyPredictor
from cotenant.scheduler.base import serving_alone

_LEAST_MS = 1e-3  # of a tasklet
_CLEARLY = 1.001  # more than rounding makes of anything


def tasklet_budget(slo_ms: float, num_decodes: int, corun: CoRun) -> int:
    """LLMStation's Equation 1 (section 4.2): the most tasklets that may run with ``num_decodes`` decode steps that must
    be done in ``slo_ms``.

    N_p ≤ (SLO_d − N_d,all · l_d0) · l_d / ((l_d − l_d0) · l_p). Where tasklets cost the decode step nothing
    (l_d = l_d0), they still have to end within the time: N_p · l_p ≤ SLO_d.
    """
    spare_ms = slo_ms - num_decodes * corun.decode_solo_ms
    if spare_ms <= 0 or corun.tasklet_corun_ms <= 0:
        return 0
    slowdown_ms = corun.decode_corun_ms - corun.decode_solo_ms
    bound_by_end = slo_ms / corun.tasklet_corun_ms
    if slowdown_ms <= 1e-6:
        return math.floor(bound_by_end)
    return math.floor(spare_ms * corun.decode_corun_ms / (slowdown_ms * corun.tasklet_corun_ms) + 1e-9)


def plan_tasklets(
    predictor: LatencyPredictor,
    batch: BatchShape,
    upcoming: tuple[TaskletRun, ...],
    slack_ms: float,
    *,
    fuse: bool = False,
) -> tuple[int, int, float]:
    """Fill ``slack_ms`` beside one decode step with the next tasklets of a job, Equation 1 for each run of equal ones.

    Returns (tasklets, how many of them are fused into the step, milliseconds they are predicted to add). With ``fuse``,
    leading forward layers run inside the step. A shape of unknown latency gets one tasklet and no more after it, if
    there is any slack at all, and as much as a prior says that it needs: that is how it becomes known.
    """
    total, num_fused, left_ms = 0, 0, slack_ms
    known: dict[int, tuple[int, float, float, CoRun]] = {}  # by the run: layers share theirs
    coruns: dict[TaskletShape, CoRun] = {}
    for run in upcoming:
        found = known.get(id(run))
        if found is None:
            if fuse and run.shape.kind is not TaskletKind.FORWARD:
                fuse, num_fused = False, total
                known.clear()
                coruns.clear()
            corun = coruns.get(run.shape) or predictor.corun(batch, run.shape, fused=fuse)
            if corun is None:
                if total == 0 and _may_be_tried(predictor, run.shape, left_ms):
                    return 1, int(fuse), 0.0
                break
            coruns[run.shape] = corun
            each_ms = corun.decode_corun_ms - corun.decode_solo_ms
            # With more than this left, Equation 1 says that all of them fit.
            clear_ms = run.count * each_ms * _CLEARLY if each_ms > _LEAST_MS else math.inf
            found = known[id(run)] = (run.count, run.count * each_ms, clear_ms, corun)
        run_count, run_ms, clear_ms, corun = found
        if left_ms > clear_ms:
            total += run_count
            left_ms -= run_ms
            continue
        count = min(run_count, tasklet_budget(left_ms + corun.decode_solo_ms, 1, corun))
        total += count
        left_ms -= count * (corun.decode_corun_ms - corun.decode_solo_ms)
        if count < run_count:
            break
    return total, total if fuse else num_fused, slack_ms - left_ms


def by_equation_1(predictor: LatencyPredictor, snapshot: Snapshot, step_ms: float, slack_ms: float) -> Plan:
    """A decode step, and as many of the job's tasklets as Equation 1 has room for in ``slack_ms``."""
    assert snapshot.job is not None
    found = plan_tasklets(predictor, snapshot.batch, snapshot.job.upcoming, slack_ms, fuse=snapshot.can_fuse)
    return in_time(step_ms, *found) if found[0] else serving_alone(predictor, snapshot)


def in_time(step_ms: float, num_tasklets: int, num_fused: int, added_ms: float) -> Plan:
    """A decode step with tasklets in it or behind it."""
    mode = Mode.FUSED if num_fused else Mode.TEMPORAL
    return Plan(num_tasklets=num_tasklets, num_fused=num_fused, mode=mode, predicted_ms=step_ms + added_ms)


class Filling(NamedTuple):
    """``num_tasklets``, the first ``num_fused`` of them inside the step. Together they add ``added_ms`` to it;
    ``alone_ms`` is what they take by themselves: how far training gets. ``is_all``: no tasklet is left."""

    num_tasklets: int
    num_fused: int
    added_ms: float
    alone_ms: float
    is_all: bool = False


def fill(
    predictor: LatencyPredictor,
    batch: BatchShape,
    upcoming: Iterable[TaskletRun],
    slack_ms: float,
    *,
    fuse: bool = False,
) -> Filling:
    """As many of the next tasklets as ``slack_ms`` has room for beside one decode step; with ``fuse`` leading forward
    layers run inside it. A shape that was never measured gets one tasklet, and no other with it, if there is room for
    what a prior says that it needs: so it is measured."""
    count = num_fused = 0
    added_ms = alone_ms = used_ms = 0.0
    is_all = slack_ms > 0
    known: dict[int, tuple[float, int, float, float, float]] = {}  # by the run: layers share theirs
    costs: dict[TaskletShape, tuple[float, float]] = {}
    for run in upcoming if slack_ms > 0 else ():
        found = known.get(id(run))
        if found is None:
            if fuse and run.shape.kind is not TaskletKind.FORWARD:
                fuse, num_fused = False, count
                known.clear()
                costs.clear()
            cost = costs.get(run.shape) or _cost(predictor, batch, run.shape, fused=fuse)
            if cost is None:
                if count == 0 and _may_be_tried(predictor, run.shape, slack_ms):
                    return Filling(1, int(fuse), 0.0, 0.0)
                is_all = False
                break
            costs[run.shape] = cost
            # Inside a step one may have been measured as adding nothing; it has to end in time all the same.
            each_ms = cost[0] if cost[0] > 0 else max(cost[1], _LEAST_MS)
            found = known[id(run)] = (each_ms, run.count, run.count * each_ms, run.count * cost[0], run.count * cost[1])
        each_ms, run_count, run_ms, run_added_ms, run_alone_ms = found
        num_fitting = (slack_ms - used_ms) / each_ms
        if num_fitting < run_count:
            num_taken, cost = max(0, math.floor(num_fitting)), costs[run.shape]
            count += num_taken
            added_ms += num_taken * cost[0]
            alone_ms += num_taken * cost[1]
            is_all = False
            break
        count += run_count
        used_ms += run_ms
        added_ms += run_added_ms
        alone_ms += run_alone_ms
    return Filling(count, count if fuse else num_fused, added_ms, alone_ms, is_all)


def _may_be_tried(predictor: LatencyPredictor, shape: TaskletShape, slack_ms: float) -> bool:
    """Whether there is room for a tasklet of a shape that was never measured."""
    return slack_ms > 0 and predictor.first_tasklet_ms(shape) <= slack_ms


def _cost(
    predictor: LatencyPredictor, batch: BatchShape, shape: TaskletShape, *, fused: bool
) -> tuple[float, float] | None:
    """What a tasklet adds to a step, and what it takes alone; None while one of them is not known."""
    added_ms = predictor.tasklet_ms(shape, beside=batch, fused=fused)
    alone_ms = predictor.tasklet_ms(shape)
    return None if added_ms is None or alone_ms is None else (added_ms, alone_ms)
