"""What every policy is."""

from __future__ import annotations

from typing import Protocol

from cotenant.core.plan import Plan, Snapshot

# With no request to wait for, an iteration runs this many tasklets before the worker looks up again. It still stops
# after the tasklet in flight when a request arrives; the number only bounds how stale its reports get.
IDLE_TASKLETS = 16


class Policy(Protocol):
    """Decides one iteration at a time. ``plan`` reads the snapshot and its predictor, and changes nothing."""

    def plan(self, snapshot: Snapshot) -> Plan: ...


def idle_tasklets(snapshot: Snapshot) -> int:
    """How many tasklets to run when nobody waits: up to the end of the step, at most ``IDLE_TASKLETS``."""
    if snapshot.job is None:
        return 0
    return min(IDLE_TASKLETS, sum(run.count for run in snapshot.job.upcoming))
