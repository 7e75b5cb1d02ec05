"""Valve's compute sharing (section 4.2): no best-effort work while any request lives, and for a while after."""

from __future__ import annotations

from cotenant.core.plan import Plan, Snapshot
from cotenant.scheduler.base import Policy, training_alone

_COOLDOWN_GAPS = 2.0


class LifecyclePolicy(Policy):
    """A request suspends training for its whole life. Training goes on once no request has been live for twice the
    largest gap between two batches of late, so that a request is met by a suspension once at most."""

    def plan(self, snapshot: Snapshot) -> Plan:
        if snapshot.requests or not snapshot.batch.empty:
            return Plan(run_online=True)
        left_s = _COOLDOWN_GAPS * snapshot.largest_gap_s - snapshot.idle_s
        if left_s > 0:
            return Plan(run_online=False, look_again_s=left_s)
        return training_alone(snapshot)
