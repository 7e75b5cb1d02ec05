"""How many tasklets fit: LLMStation section 4.2."""

from __future__ import annotations

import math

from cotenant.core.plan import BatchShape
from cotenant.core.tasklet import TaskletKind, TaskletRun
from cotenant.predictor.predictor import CoRun, LatencyPredictor


def tasklet_budget(slo_ms: float, num_decodes: int, corun: CoRun) -> int:
    """Equation 1: the most tasklets that may run with ``num_decodes`` decode steps that must be done in ``slo_ms``.

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
