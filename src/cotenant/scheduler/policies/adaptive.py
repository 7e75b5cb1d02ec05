"""The way of sharing that gets training furthest within the requests' slack, chosen at each iteration."""

from __future__ import annotations

from cotenant.core.plan import Mode, Plan, Snapshot
from cotenant.core.tasklet import TaskletKind
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.scheduler.base import plan_of_one, serving_alone
from cotenant.scheduler.planner import Filling, fill
from cotenant.scheduler.slack import decode_slack_ms


class AdaptivePolicy:
    """Slack is counted for each request, and aimed at with the margin that the requests so far have taught. It is
    filled with tasklets behind the decode step (temporal) and, where a job's layers can run inside it, with fused ones;
    the plan with the most training per second is taken. Requests that wait for their first token come first: training
    is suspended for them.
    """

    def __init__(self, predictor: LatencyPredictor) -> None:
        self._predictor = predictor

    def plan(self, snapshot: Snapshot) -> Plan:
        plan = plan_of_one(self._predictor, snapshot)
        step_ms = self._predictor.batch_ms(snapshot.batch, beside_training=True)
        if plan is not None or snapshot.job is None or step_ms is None:
            return plan or serving_alone(self._predictor, snapshot)
        batch, upcoming = snapshot.batch, snapshot.job.upcoming
        slack_ms = decode_slack_ms(snapshot.requests, snapshot.slo, snapshot.now_s, step_ms, snapshot.margin)
        fillings = [fill(self._predictor, batch, upcoming, slack_ms)]
        if snapshot.can_fuse and upcoming and upcoming[0].shape.kind is TaskletKind.FORWARD:
            fillings.append(fill(self._predictor, batch, upcoming, slack_ms, fuse=True))
        best = max(fillings, key=lambda filling: _speed(filling, step_ms))
        if best.num_tasklets == 0:
            return serving_alone(self._predictor, snapshot)
        return Plan(
            num_tasklets=best.num_tasklets,
            num_fused=best.num_fused,
            mode=Mode.FUSED if best.num_fused else Mode.TEMPORAL,
            predicted_ms=step_ms + best.added_ms,
        )


def _speed(filling: Filling, step_ms: float) -> float:
    """Training, as time that it would take alone, per time. What is not known yet is worth trying."""
    if filling.num_tasklets and filling.alone_ms == 0.0:
        return float("inf")
    return filling.alone_ms / (step_ms + filling.added_ms)
