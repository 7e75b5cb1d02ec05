"""How many tasklets fit beside a decode step."""

from __future__ import annotations

import math

from cotenant.core.plan import BatchShape, Mode, Plan, Snapshot
from cotenant.core.tasklet import TaskletCycle, TaskletKind, TaskletShape, runs_of
from cotenant.predictor.predictor import CoRun, LatencyPredictor
from cotenant.scheduler.base import serving_alone
from cotenant.scheduler.filling import LEAST_MS, may_be_tried

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
    upcoming: tuple[TaskletCycle, ...],
    slack_ms: float,
    *,
    fuse: bool = False,
) -> tuple[int, int, float]:
    """Fill ``slack_ms`` beside one decode step with the next tasklets of a job, Equation 1 for each run of equal ones.

    Returns (tasklets, how many of them are fused into the step, milliseconds they are predicted to add). With ``fuse``,
    leading forward layers run inside the step. A shape of unknown latency, or one that is too long by what was measured
    long ago, gets one tasklet and no more after it, if there is any slack at all, and as much as a prior says that it
    needs: that is how it becomes known.
    """
    total, num_fused, left_ms = 0, 0, slack_ms
    known: dict[int, tuple[int, float, float, CoRun]] = {}  # by the run: layers share theirs
    coruns: dict[TaskletShape, CoRun] = {}
    for run in runs_of(upcoming):
        found = known.get(id(run))
        if found is None:
            if fuse and run.shape.kind is not TaskletKind.FORWARD:
                fuse, num_fused = False, total
                known.clear()
                coruns.clear()
            corun = coruns.get(run.shape) or predictor.corun(batch, run.shape, fused=fuse)
            if corun is None:
                if total == 0 and may_be_tried(predictor, run.shape, left_ms):
                    return 1, int(fuse), 0.0
                break
            coruns[run.shape] = corun
            each_ms = corun.decode_corun_ms - corun.decode_solo_ms
            # With more than this left, Equation 1 says that all of them fit.
            clear_ms = run.count * each_ms * _CLEARLY if each_ms > LEAST_MS else math.inf
            found = known[id(run)] = (run.count, run.count * each_ms, clear_ms, corun)
        run_count, run_ms, clear_ms, corun = found
        if left_ms > clear_ms:
            total += run_count
            left_ms -= run_ms
            continue
        count = min(run_count, tasklet_budget(left_ms + corun.decode_solo_ms, 1, corun))
        if (
            total == count == 0
            and predictor.may_have_changed(run.shape)
            and may_be_tried(predictor, run.shape, left_ms)
        ):
            return 1, int(fuse), 0.0
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


def in_time(step_ms: float, num_tasklets: int, num_fused: int, added_ms: float, hold_ms: float = 0.0) -> Plan:
    """A decode step with tasklets in it or behind it."""
    mode, predicted_ms = Mode.FUSED if num_fused else Mode.TEMPORAL, step_ms + added_ms
    return Plan(num_tasklets=num_tasklets, num_fused=num_fused, hold_ms=hold_ms, mode=mode, predicted_ms=predicted_ms)
