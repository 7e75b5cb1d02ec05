"""Iteration-level multitasking: LLMStation section 4.1, Algorithm 1, with slack counted per request."""

from __future__ import annotations

from cotenant.core.plan import Plan, Snapshot
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.scheduler.base import Policy, plan_or_step_ms
from cotenant.scheduler.planner import by_equation_1
from cotenant.scheduler.slack import decode_slack_ms


class MultitaskPolicy(Policy):
    """New requests are prefilled first, with training suspended (lines 8–15). A decode step takes along as many
    tasklets as Equation 1 allows within the slack of the most urgent request: fused while the job is in a forward pass
    whose layers can be (lines 16–18), behind it otherwise, where LLMStation runs them in parallel (lines 19–23; see
    `llmstation`). With no request, it is plain training. While a request waits for a place in the batch, nothing delays
    the batch that it waits for.
    """

    def __init__(self, predictor: LatencyPredictor) -> None:
        self._predictor = predictor

    def plan(self, snapshot: Snapshot) -> Plan:
        step_ms = plan_or_step_ms(self._predictor, snapshot)
        if isinstance(step_ms, Plan):
            return step_ms
        begin_s = snapshot.now_s + snapshot.wait_ms / 1e3
        slack_ms = decode_slack_ms(snapshot.requests, snapshot.slo, begin_s, step_ms)
        return by_equation_1(self._predictor, snapshot, step_ms, slack_ms)
