"""LLMStation's Algorithm 1 (section 4.1) with one decoding SLO for every iteration."""

from __future__ import annotations

from cotenant.core.plan import Plan, Snapshot
from cotenant.core.tasklet import TaskletCycle, TaskletKind
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.scheduler.base import Policy, iteration_target_ms, plan_or_step_ms
from cotenant.scheduler.filling import Costs, after, fill
from cotenant.scheduler.planner import by_equation_1
from cotenant.scheduler.space import Beside, in_each, in_space, to_try

_CLEARLY = 1.03  # times as fast, or it is not worth to leave a partition and come back
_BACKWARD = (
    TaskletKind.BACKWARD,
    TaskletKind.BACKWARD_DOWN,
    TaskletKind.BACKWARD_UP,
    TaskletKind.BACKWARD_ATTENTION,
    TaskletKind.RECOMPUTE,
    TaskletKind.RECOMPUTE_ATTENTION,
    TaskletKind.RECOMPUTE_UP,
)


class LlmStationPolicy(Policy):
    """As published: new requests are prefilled first, with training suspended; a decode step takes along as many
    tasklets as Equation 1 allows within the TPOT target, whatever a request has been served faster or slower before (to
    count that is what `multitask` adds). In a forward they are fused into the step (lines 15 to 18), in a backward they
    run in parallel with it (lines 19 to 23): here on the SMs that a partition leaves them, the one with which training
    is fastest, and behind the step for what is left of the target. Where that is slower than all of them behind a step
    that has all SMs, or there are no partitions, they run behind it.

    What differs: forward layers are fused only where they can be. Captured layers, which most jobs on a GPU have,
    cannot: theirs run behind the step, by Equation 1's budget. The target is aimed at with the learned margin, and the
    longest gap is kept. Tasklets that the step waits for were counted with the one before. What the paper says of
    prompts besides, that short ones share the device and that arrivals are deferred, is left out.
    """

    aims = True

    def __init__(self, predictor: LatencyPredictor) -> None:
        self._predictor = predictor
        self._costs = Costs(predictor)

    def plan(self, snapshot: Snapshot) -> Plan:
        step_ms = plan_or_step_ms(self._predictor, snapshot)
        if isinstance(step_ms, Plan):
            return step_ms
        assert snapshot.job is not None
        target_ms, upcoming = iteration_target_ms(snapshot), snapshot.job.upcoming
        if snapshot.partitions and snapshot.job.next_shape.kind in _BACKWARD:
            in_parallel = self._in_parallel(snapshot, upcoming, step_ms, target_ms)
            if in_parallel is not None:
                return in_parallel
        return by_equation_1(self._predictor, snapshot, step_ms, target_ms - step_ms)

    def _in_parallel(
        self, snapshot: Snapshot, upcoming: tuple[TaskletCycle, ...], step_ms: float, target_ms: float
    ) -> Plan | None:
        """None where tasklets behind a step on all SMs get training further, in the same time."""
        costs = self._costs.renew_for(snapshot.batch)
        found = in_each(costs, snapshot.partitions, upcoming, step_ms)
        unknown = to_try(found, snapshot.slo.max_gap_ms)  # LLMStation has profiled it before
        if unknown is not None:
            return in_space(unknown)
        behind = fill(costs, upcoming, target_ms - step_ms)
        if behind.num_tasklets and not behind.alone_ms:
            return None  # one of an unknown shape
        best, best_speed = None, _CLEARLY * behind.alone_ms / (step_ms + behind.added_ms)
        for shared in found:
            if not shared.is_known or shared.step_ms > target_ms:
                continue
            plan, speed = _filled(costs, upcoming, shared, target_ms)
            if speed > best_speed:
                best, best_speed = plan, speed
        return best


def _filled(costs: Costs, upcoming: tuple[TaskletCycle, ...], shared: Beside, target_ms: float) -> tuple[Plan, float]:
    """The step in a partition, with tasklets beside it and, in what is left of the target, behind it; and how far that
    gets training in a millisecond, in those that it would take alone."""
    left_ms = target_ms - shared.step_ms - shared.rest_ms
    rest = fill(costs, after(upcoming, shared.num_tasklets + 1, costs.behind), left_ms)
    if not rest.alone_ms:
        return in_space(shared), shared.alone_ms / shared.step_ms
    behind_ms = shared.rest_ms + rest.added_ms
    gained_ms = shared.alone_ms + shared.rest_alone_ms + rest.alone_ms
    return in_space(shared, rest.num_tasklets, behind_ms), gained_ms / (shared.step_ms + behind_ms)
