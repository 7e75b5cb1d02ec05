"""No tasklets: an iteration waits for the whole training step. What one gets without suspendable work."""

from __future__ import annotations

from cotenant.core.plan import Mode, Plan, Snapshot
from cotenant.scheduler.base import Policy


class WholeStepPolicy(Policy):
    """One online batch, then one whole training step, whatever arrives meanwhile."""

    def plan(self, snapshot: Snapshot) -> Plan:
        has_job = snapshot.job is not None
        return Plan(
            run_online=not snapshot.batch.empty,
            until_step_end=has_job,
            interruptible=False,
            mode=Mode.TEMPORAL if has_job else Mode.NONE,
        )
