"""LLMStation as published: Algorithm 1 (section 4.1) with one decoding SLO for every iteration."""

from __future__ import annotations

from cotenant.core.plan import Plan, Snapshot
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.scheduler.base import Policy, iteration_target_ms, plan_or_step_ms
from cotenant.scheduler.planner import by_equation_1


class LlmStationPolicy(Policy):
    """New requests are prefilled first, with training suspended. A decode step takes along as many tasklets as Equation
    1 allows within the TPOT target, aimed at with the learned margin, and within the longest gap: fused in a forward
    pass where layers can be, beside the step otherwise. What a request has been served faster or slower before does not
    count, which is what `multitask` adds.
    """

    def __init__(self, predictor: LatencyPredictor) -> None:
        self._predictor = predictor

    def plan(self, snapshot: Snapshot) -> Plan:
        step_ms = plan_or_step_ms(self._predictor, snapshot)
        if isinstance(step_ms, Plan):
            return step_ms
        return by_equation_1(self._predictor, snapshot, step_ms, iteration_target_ms(snapshot) - step_ms)
