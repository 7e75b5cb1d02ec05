"""LLMStation's Algorithm 1 (section 4.1) with one decoding SLO for every iteration, and tasklets behind the steps."""

from __future__ import annotations

from cotenant.core.plan import Plan, Snapshot
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.scheduler.base import Policy, iteration_target_ms, plan_or_step_ms
from cotenant.scheduler.planner import by_equation_1


class LlmStationPolicy(Policy):
    """As published: new requests are prefilled first, with training suspended; a decode step takes along as many
    tasklets as Equation 1 allows within the TPOT target, whatever a request has been served faster or slower before.
    To count that is what `multitask` adds.

    What differs: backward tasklets run behind the step, where LLMStation runs them in parallel with it (lines 19–23),
    for on all SMs batches and tasklets take turns here, so Equation 1's l_d is a step and then a tasklet. Forward
    layers are fused into the step only where they can be: captured layers, which most jobs on a GPU have, cannot. With
    those it is sharing in time, by Equation 1's budget. The target is aimed at with the learned margin, and the longest
    gap is kept. Tasklets that the step waits for were counted with the one before. What the paper says of prompts
    besides, that short ones share the device and that arrivals are deferred, is left out.
    """

    aims = True

    def __init__(self, predictor: LatencyPredictor) -> None:
        self._predictor = predictor

    def plan(self, snapshot: Snapshot) -> Plan:
        step_ms = plan_or_step_ms(self._predictor, snapshot)
        if isinstance(step_ms, Plan):
            return step_ms
        return by_equation_1(self._predictor, snapshot, step_ms, iteration_target_ms(snapshot) - step_ms)
