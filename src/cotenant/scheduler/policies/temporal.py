"""Training only while no request is running: the simplest sharing in time."""

from __future__ import annotations

from cotenant.core.plan import Plan, Snapshot
from cotenant.scheduler.base import Policy, training_alone


class TemporalPolicy(Policy):
    """Tasklets when there is no live request; they stop after those in flight when one arrives."""

    def plan(self, snapshot: Snapshot) -> Plan:
        if snapshot.requests or not snapshot.batch.empty:
            return Plan(run_online=True)
        return training_alone(snapshot)
