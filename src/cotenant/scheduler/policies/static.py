"""A fixed split of the SMs, 60% for requests: StaticMode, which Harli is compared with (section 8.1)."""

from __future__ import annotations

from cotenant.core.plan import Mode, Plan, Snapshot
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.scheduler.base import IDLE_TASKLETS, Policy, idle_tasklets
from cotenant.scheduler.policies.temporal import TemporalPolicy
from cotenant.scheduler.space import nearest, sm_shares


class StaticPolicy(Policy):
    """While there is a job each tenant has its SMs, whatever the other does: batches of all kinds run on 60% of them,
    training on the rest, also while there is nothing to serve. Without a job batches have all SMs. Memory is not
    divided, as StaticMode's is. Without partitions training is suspended while requests are live."""

    def __init__(self, predictor: LatencyPredictor) -> None:
        self._predictor = predictor
        self._in_time = TemporalPolicy()

    def plan(self, snapshot: Snapshot) -> Plan:
        if snapshot.job is None or not snapshot.partitions:
            return self._in_time.plan(snapshot)
        (partition,) = nearest(snapshot.partitions, sm_shares("static"))
        has_batch = not snapshot.batch.empty
        # Beside a batch they end with it.
        count = IDLE_TASKLETS if has_batch else idle_tasklets(snapshot)
        return Plan(
            run_online=has_batch,
            num_tasklets=count,
            num_beside=count,
            partition=partition,
            mode=Mode.SPATIAL,
            predicted_ms=self._predictor.batch_ms(snapshot.batch, beside_training=True, partition=partition),
        )
