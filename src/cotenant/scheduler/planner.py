"""How many tasklets fit beside a decode step."""

from __future__ import annotations

import math
from typing import NamedTuple

from cotenant.core.plan import BatchShape
from cotenant.core.tasklet import TaskletKind, TaskletRun, TaskletShape
from cotenant.predictor.predictor import CoRun, LatencyPredictor


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
    there is any slack at all: that is how it becomes known.
    """
    total, num_fused, left_ms = 0, 0, slack_ms
    for run in upcoming:
        fused = fuse and total == num_fused and run.shape.kind is TaskletKind.FORWARD
        corun = predictor.corun(batch, run.shape, fused=fused)
        if corun is None:
            if left_ms > 0 and total == 0:
                return 1, int(fused), 0.0
            break
        count = min(run.count, tasklet_budget(left_ms + corun.decode_solo_ms, 1, corun))
        total += count
        num_fused += count if fused else 0
        left_ms -= count * (corun.decode_corun_ms - corun.decode_solo_ms)
        if count < run.count:
            break
    return total, num_fused, slack_ms - left_ms


_LEAST_MS = 1e-3  # of a tasklet


class Filling(NamedTuple):
    """``num_tasklets``, the first ``num_fused`` of them inside the step. Together they add ``added_ms`` to it;
    ``alone_ms`` is what they take by themselves: how far training gets."""

    num_tasklets: int
    num_fused: int
    added_ms: float
    alone_ms: float


def fill(
    predictor: LatencyPredictor,
    batch: BatchShape,
    upcoming: tuple[TaskletRun, ...],
    slack_ms: float,
    *,
    fuse: bool = False,
) -> Filling:
    """As many of the next tasklets as ``slack_ms`` has room for beside one decode step; with ``fuse`` leading forward
    layers run inside it. A shape that was never measured gets one tasklet, and no other with it: so it is measured."""
    count = num_fused = 0
    added_ms = alone_ms = used_ms = 0.0
    costs: dict[tuple[TaskletShape, bool], tuple[float, float] | None] = {}
    for run in upcoming if slack_ms > 0 else ():
        fused = fuse and count == num_fused and run.shape.kind is TaskletKind.FORWARD
        key = (run.shape, fused)
        if key not in costs:
            costs[key] = _cost(predictor, batch, run.shape, fused=fused)
        cost = costs[key]
        if cost is None:
            if count == 0:
                return Filling(1, int(fused), 0.0, 0.0)
            break
        each_added_ms, each_alone_ms = cost
        # Inside a step one may have been measured as adding nothing; it has to end in time all the same.
        each_used_ms = each_added_ms if each_added_ms > 0 else max(each_alone_ms, _LEAST_MS)
        num_taken = max(0, min(run.count, math.floor((slack_ms - used_ms) / each_used_ms)))
        count += num_taken
        num_fused += num_taken if fused else 0
        used_ms += num_taken * each_used_ms
        added_ms += num_taken * each_added_ms
        alone_ms += num_taken * each_alone_ms
        if num_taken < run.count:
            break
    return Filling(count, num_fused, added_ms, alone_ms)


def _cost(
    predictor: LatencyPredictor, batch: BatchShape, shape: TaskletShape, *, fused: bool
) -> tuple[float, float] | None:
    """What a tasklet adds to a step, and what it takes alone; None while one of them is not known."""
    added_ms = predictor.tasklet_ms(shape, beside=batch, fused=fused)
    alone_ms = predictor.tasklet_ms(shape)
    return None if added_ms is None or alone_ms is None else (added_ms, alone_ms)
