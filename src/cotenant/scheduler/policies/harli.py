"""Harli's scheduler (section 6.2): decode steps share the device in space, always."""

from __future__ import annotations

from operator import attrgetter

from cotenant.core.plan import Plan, Snapshot
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.scheduler.base import Policy, iteration_target_ms, plan_or_step_ms, serving_alone
from cotenant.scheduler.filling import Costs
from cotenant.scheduler.space import in_each, in_space, to_try


class HarliPolicy(Policy):
    """Each decode step has the partition in which it is predicted to end latest within the TPOT target (section 5.2.3:
    training is fastest there), aimed at with the learned margin; training has the other SMs. Where no partition is fast
    enough, training is suspended. Harli serves prompts elsewhere; here they have the device to themselves.
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
        costs = self._costs.renew_for(snapshot.batch)
        found = in_each(costs, snapshot.partitions, snapshot.job.upcoming, step_ms)
        unknown = to_try(found, snapshot.slo.max_gap_ms)  # Harli has measured it before
        if unknown is not None:
            return in_space(unknown)
        target_ms = iteration_target_ms(snapshot)
        fitting = [each for each in found if each.is_known and each.step_ms <= target_ms]
        if not fitting:
            return serving_alone(self._predictor, snapshot)
        return in_space(max(fitting, key=attrgetter("step_ms")))
