"""No best-effort work at all: what the online tenant gets when it is alone."""

from __future__ import annotations

from cotenant.core.plan import Plan, Snapshot
from cotenant.scheduler.base import Policy


class InferenceOnlyPolicy(Policy):
    """Runs the online batch and nothing else."""

    def plan(self, snapshot: Snapshot) -> Plan:
        return Plan(run_online=not snapshot.batch.empty)
