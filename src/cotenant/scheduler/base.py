"""What every policy is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from cotenant.core.plan import FIRST_MARGIN, BatchShape, InFlight, Mode, Plan, RequestView, Slo, Snapshot
from cotenant.predictor.predictor import LatencyPredictor

# With no request to wait for, an iteration runs this many tasklets before the worker looks up again. It still stops
# after the tasklets in flight when a request arrives; the number only bounds how stale its reports get.
IDLE_TASKLETS = 16
# Train beside a decode step only as far as this one step leaves time for it: what a request was served faster before
# does not count.
STEP_BY_STEP = ("chunked", "llmstation")


class Policy(Protocol):
    """Decides one iteration at a time. ``plan`` reads the snapshot and its predictor, and changes neither; what the
    predictor said may be kept for a few plans. ``aims``: whether it goes by the snapshot's margin."""

    aims: bool = False

    def plan(self, snapshot: Snapshot) -> Plan: ...

    def first_margin(self, slo: Slo, step_ms: float) -> float:
        """The share of the TPOT target that it aims at before any request has told how close is too close, where a step
        takes ``step_ms`` (0: not known)."""
        return FIRST_MARGIN


def training_alone(snapshot: Snapshot) -> Plan:
    """For an iteration without a batch: as many tasklets as there may be, or one while there are requests, for which a
    batch may be there at any moment."""
    count = idle_tasklets(snapshot)
    if snapshot.requests:
        count = min(1, count)
    return Plan(run_online=False, num_tasklets=count, mode=Mode.TEMPORAL if count else Mode.NONE)


def iteration_target_ms(snapshot: Snapshot) -> float:
    """How long an iteration may take where each has to meet the TPOT target by itself, aimed at with the margin, and no
    gap may be longer than the longest that is allowed."""
    return min(snapshot.margin * snapshot.slo.tpot_ms, snapshot.slo.max_gap_ms)


def serving_alone(predictor: LatencyPredictor, snapshot: Snapshot) -> Plan:
    """The batch, and nothing beside it."""
    return Plan(run_online=True, predicted_ms=next_batch_ms(predictor, snapshot))


def next_batch_ms(predictor: LatencyPredictor, snapshot: Snapshot) -> float | None:
    """What the batch takes on all SMs, once it has begun."""
    return predictor.batch_ms(snapshot.batch, behind_tasklets=snapshot.behind_tasklets)


def plan_or_step_ms(predictor: LatencyPredictor, snapshot: Snapshot) -> Plan | float:
    """The plan, where one tenant has the iteration to itself: there is no batch, or no job, or a request has its prompt
    in the batch or waits for a place in one, which nothing delays, or nobody knows yet what the batch takes. Otherwise
    tasklets may run beside its decodes: what it takes, in milliseconds, once it has begun.

    A prompt that ends with the batch in flight waits no longer, though its first token is not known yet.
    """
    if snapshot.batch.empty:
        return training_alone(snapshot)
    if snapshot.job is None or snapshot.batch.prefill_tokens > 0 or waits_longer(snapshot):
        return serving_alone(predictor, snapshot)
    step_ms = next_batch_ms(predictor, snapshot)
    return serving_alone(predictor, snapshot) if step_ms is None else step_ms


def flight_ms(predictor: LatencyPredictor, in_flight: InFlight) -> float | None:
    """How long a batch in flight takes, by its plan or else by the predictor; None where neither knows."""
    if in_flight.predicted_ms is not None:
        return in_flight.predicted_ms
    partition = in_flight.partition
    return predictor.batch_ms(in_flight.batch, beside_training=partition is not None, partition=partition)


def waits_longer(snapshot: Snapshot) -> bool:
    """Whether a prompt is there that could run and does not end with the batch."""
    num_ending = snapshot.num_ending
    for request in snapshot.requests:  # of many that wait a few tell
        if request.num_prompt_tokens_left and not request.waits_for_adapter:
            if num_ending == 0:
                return True
            num_ending -= 1
    return False


def prompts_of(requests: Iterable[RequestView]) -> list[RequestView]:
    """Those whose prompts have tokens left and could run, in the same order."""
    return [request for request in requests if request.num_prompt_tokens_left and not request.waits_for_adapter]


def num_batches(batch: BatchShape, requests: Iterable[RequestView]) -> float:
    """How many batches like this one, which has prompts, the prompts of ``requests`` need: 1 at least."""
    return max(1.0, sum([request.num_prompt_tokens_left for request in requests]) / batch.prefill_tokens)


def idle_tasklets(snapshot: Snapshot) -> int:
    """How many tasklets to run when nobody waits: up to the end of the step, at most ``IDLE_TASKLETS``."""
    if snapshot.job is None:
        return 0
    return min(IDLE_TASKLETS, snapshot.job.num_left)
