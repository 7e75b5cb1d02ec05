"""LLMStation as published: Algorithm 1 (section 4.1) with one decoding SLO for every iteration."""

from __future__ import annotations

from cotenant.core.plan import Plan, Snapshot
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.scheduler.base import plan_of_one, serving_alone
from cotenant.scheduler.planner import by_equation_1


class LlmStationPolicy:
    """New requests are prefilled first, with training suspended. A decode step takes along as many tasklets as Equation
    1 allows within the TPOT target, aimed at with the learned margin: fused in a forward pass where layers can be,
    beside the step otherwise. What a request has been served faster or slower before does not count, which is what
    `multitask` adds.
    """

    def __init__(self, predictor: LatencyPredictor) -> None:
        self._predictor = predictor

    def plan(self, snapshot: Snapshot) -> Plan:
        plan = plan_of_one(self._predictor, snapshot)
        step_ms = self._predictor.batch_ms(snapshot.batch, beside_training=True)
        if plan is not None or snapshot.job is None or step_ms is None:
            return plan or serving_alone(self._predictor, snapshot)
        return by_equation_1(self._predictor, snapshot, step_ms, snapshot.margin * snapshot.slo.tpot_ms - step_ms)
