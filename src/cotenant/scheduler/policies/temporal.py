"""Training only while no request is running: the simplest sharing in time."""

from __future__ import annotations

from cotenant.core.plan import Mode, Plan, Snapshot
from cotenant.scheduler.base import idle_tasklets


class TemporalPolicy:
    """Tasklets when there is no live request; they stop after the one in flight when one arrives."""

    def plan(self, snapshot: Snapshot) -> Plan:
        if snapshot.requests or not snapshot.batch.empty:
            return Plan(run_online=True)
        count = idle_tasklets(snapshot)
        return Plan(run_online=False, num_tasklets=count, mode=Mode.TEMPORAL if count else Mode.NONE)
