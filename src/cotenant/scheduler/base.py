"""What every policy is."""

from __future__ import annotations

from typing import Protocol

from cotenant.core.plan import Mode, Plan, Snapshot

# With no request to wait for, an iteration runs this many tasklets before the worker looks up again. It still stops
# after the tasklet in flight when a request arrives; the number only bounds how stale its reports get.
IDLE_TASKLETS = 16


class Policy(Protocol):
    """Decides one iteration at a time. ``plan`` reads the snapshot and its predictor, and changes nothing."""

    def plan(self, snapshot: Snapshot) -> Plan: ...


def training_alone(snapshot: Snapshot) -> Plan:
    """For an iteration without a batch: as many tasklets as there may be, or one while there are requests, for which a
    batch may be there at any moment."""
    count = idle_tasklets(snapshot)
    if snapshot.requests:
        count = min(1, count)
    return Plan(run_online=False, num_tasklets=count, mode=Mode.TEMPORAL if count else Mode.NONE)


def suspends_training(snapshot: Snapshot) -> bool:
    """Whether a request waits for its first token, or a prompt is part of the batch: then nothing delays it."""
    return snapshot.batch.prefill_tokens > 0 or any(request.first_token_s is None for request in snapshot.requests)


def idle_tasklets(snapshot: Snapshot) -> int:
    """How many tasklets to run when nobody waits: up to the end of the step, at most ``IDLE_TASKLETS``."""
    if snapshot.job is None:
        return 0
    return min(IDLE_TASKLETS, sum(run.count for run in snapshot.job.upcoming))
