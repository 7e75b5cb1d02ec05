"""Training in pieces with every batch, after FlexLLM's chunked training as LLMStation describes it (section 2)."""

from __future__ import annotations

from cotenant.core.plan import Plan, Snapshot
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.scheduler.base import Policy, iteration_target_ms, next_batch_ms, serving_alone, training_alone
from cotenant.scheduler.filling import Costs, fill
from cotenant.scheduler.planner import in_time


class ChunkedPolicy(Policy):
    """Every batch, prompts too, takes a piece of training along: as many layers of a micro-batch, forward or backward,
    as keep this one iteration within the TPOT target, aimed at with the learned margin, and within the longest gap.
    What a request was served faster before is not counted, nor who waits, nor tasklets that the batch waits for: they
    were counted with the one before.

    What differs: FlexLLM divides the training sequence into chunks of tokens, keeps what later chunks need of them, and
    batches them with the requests' tokens, forward and backward. Here a piece is whole layers, or captured parts of
    them, over all tokens of a micro-batch (`--tasklet-tokens`), for how a step is cut must not depend on load: the bits
    of its sums would, too. Only forward layers that are not captured are fused into the batch; others run behind it.
    """

    aims = True

    def __init__(self, predictor: LatencyPredictor) -> None:
        self._predictor = predictor

    def plan(self, snapshot: Snapshot) -> Plan:
        if snapshot.batch.empty:
            return training_alone(snapshot)
        batch_ms = next_batch_ms(self._predictor, snapshot)
        if snapshot.job is None or batch_ms is None:
            return serving_alone(self._predictor, snapshot)
        left_ms = iteration_target_ms(snapshot) - batch_ms
        filling = fill(Costs(self._predictor, snapshot.batch), snapshot.job.upcoming, left_ms, fuse=snapshot.can_fuse)
        if filling.num_tasklets == 0:
            return serving_alone(self._predictor, snapshot)
        return in_time(batch_ms, filling.num_tasklets, filling.num_fused, filling.added_ms)
