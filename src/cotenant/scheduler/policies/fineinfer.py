"""FineInfer's deferred continuous batching (He et al., EuroMLSys 2024), as LLMStation section 2 describes it."""

from __future__ import annotations

from cotenant.core.plan import Plan, Snapshot
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.scheduler.base import Policy, num_batches, training_alone
from cotenant.scheduler.slack import SAFETY


class FineInferPolicy(Policy):
    """Sharing in time by whole phases. While no request runs, those that arrive are held, training goes on, and more
    can join them; until the first of them must begin to keep its TTFT target. From then on training is suspended as
    long as any request is live. Suspension is between tasklets, where the original waits for a training step.
    """

    def __init__(self, predictor: LatencyPredictor) -> None:
        self._predictor = predictor

    def plan(self, snapshot: Snapshot) -> Plan:
        is_idle = not snapshot.requests and snapshot.batch.empty
        if is_idle or (snapshot.job is not None and self._may_be_held(snapshot)):
            return training_alone(snapshot)
        return Plan(run_online=True)

    def _may_be_held(self, snapshot: Snapshot) -> bool:
        """Whether no request has begun, and all can still have their first token in time a tasklet later."""
        assert snapshot.job is not None
        if any(request.has_begun for request in snapshot.requests):
            return False
        prompts_ms = self._prompts_ms(snapshot)
        tasklet_ms = self._predictor.tasklet_ms(snapshot.job.next_shape)
        if prompts_ms is None or tasklet_ms is None:
            return False
        first_s = min((request.arrival_s for request in snapshot.requests), default=snapshot.now_s)
        left_ms = SAFETY * snapshot.slo.ttft_ms - (snapshot.now_s - first_s) * 1e3
        return left_ms > prompts_ms + tasklet_ms

    def _prompts_ms(self, snapshot: Snapshot) -> float | None:
        """Until all prompts are done: batches like the next one, as many as have room for their tokens."""
        batch = snapshot.batch
        batch_ms = self._predictor.batch_ms(batch)
        if batch_ms is None or batch.prefill_tokens == 0:
            return batch_ms
        return batch_ms * num_batches(batch, snapshot.requests)
