"""The way of sharing that gets training furthest within the requests' slack, chosen at each iteration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter

import msgspec

from cotenant.core.plan import FIRST_MARGIN, BatchShape, JobView, Mode, Partition, Plan, Slo, Snapshot
from cotenant.core.tasklet import TaskletKind
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.scheduler.base import Policy, flight_ms, next_batch_ms, serving_alone, training_alone, waits_longer
from cotenant.scheduler.filling import Costs, Filling, after, fill
from cotenant.scheduler.holding import held_ms
from cotenant.scheduler.planner import in_time
from cotenant.scheduler.slack import decode_slack_ms, token_slack_ms
from cotenant.scheduler.space import Beside, in_each, in_space

# A millisecond of slack is worth what tasklets behind a step make of it, less a share. It is spent once as much as the
# longest gap allows has been saved up, and of that so much is lost as a partition is left: SMs wait, and draw power.
# Not below the least: slack is no good unspent, and a way of sharing that wastes time is to wait until there is more.
_LOST_MS = 2.0
_LEAST_SLACK_WORTH = 0.9
# Tasklets behind a step, and a step on other SMs than the one before, cost about this much: the tasklet in flight is in
# another's way, and SMs wait for its end. It takes some tasklets behind a step to be worth that, and some steps in a
# partition.
_LEAVING_MS = 0.7
_STEPS_IN_PARTITION = 8
# A step in a partition may make requests late by what so many tokens can make up for, but by no more than so many TPOT
# targets.
_CATCHING_UP_TOKENS, _MOST_LATE_TARGETS = 100, 10
# Of the TTFT target, what new requests wait for tasklets behind a batch: where they come one after the other, training
# would else get nothing. No longer than that, though: where there is no target to speak of, messages wait, too.
_HOLD_SHARE, _MOST_HOLD_MS = 0.005, 10.0
# Of what a step leaves of the TPOT target, the share that is aimed at before any request has been judged.
_FIRST_SHARE = 0.8


class _Candidate(msgspec.Struct, frozen=True, gc=False):
    """What makes a plan; how far this gets training (time that it would take alone; None: not known yet, and so worth
    trying); what it adds to a step with all SMs, with what it costs that the host does not run ahead; whether nothing
    is left of the training step."""

    make: Callable[[], Plan]
    gained_ms: float | None
    added_ms: float
    is_all: bool = False


class AdaptivePolicy(Policy):
    """Slack is counted for each request, and aimed at with the margin that the requests so far have taught. Ways of
    filling it are compared, and the one is taken that gets training furthest, the slack that it takes being counted at
    what tasklets behind a step would make of it:

    - tasklets behind the decode step (temporal),
    - forward layers inside it, where a job's can be (fused),
    - the step on a part of the SMs and tasklets on the others (spatial), alone or with tasklets behind it.

    Beside prompts it is the first of these, if all of them end with the batch: tasklets behind it delay no first token
    but those of requests that come meanwhile, which wait for a small part of their target at most.
    Prompts that need more batches, and requests that wait for a place in one, have the device to themselves. Before the
    first of them begins, tasklets spend what running requests have saved up, which is of no use from then on.

    Requests' slack is spent as it comes, so short answers miss their target where prompts come in bursts and the margin
    has not been learned yet. So it begins further below the target than others', by a part of what a step leaves of it
    (where that is more): that costs training little, and less where answers are long.
    """

    aims = True

    def __init__(self, predictor: LatencyPredictor) -> None:
        self._predictor = predictor
        self._costs = Costs(predictor)

    def first_margin(self, slo: Slo, step_ms: float) -> float:
        step_share = min(1.0, step_ms / slo.tpot_ms)
        return min(FIRST_MARGIN, step_share + _FIRST_SHARE * (1.0 - step_share))

    def plan(self, snapshot: Snapshot) -> Plan:
        if snapshot.batch.empty:
            return training_alone(snapshot)
        if snapshot.job is not None and snapshot.batch.prefill_tokens and (held := self._held(snapshot, snapshot.job)):
            return held
        if snapshot.job is None or waits_longer(snapshot):
            return serving_alone(self._predictor, snapshot)
        step_ms = next_batch_ms(self._predictor, snapshot)
        if step_ms is None:
            return serving_alone(self._predictor, snapshot)
        costs = self._costs.renew_for(snapshot.batch)
        return _Choice(costs, snapshot, snapshot.job, step_ms).best() or serving_alone(self._predictor, snapshot)

    def _held(self, snapshot: Snapshot, job: JobView) -> Plan | None:
        """Tasklets before the batch, for which its prompts are held."""
        time_ms = held_ms(self._predictor, snapshot)
        count = fill(self._costs.renew_for(BatchShape()), job.upcoming, time_ms).num_tasklets if time_ms > 0 else 0
        if not count:
            return None
        return Plan(run_online=False, num_tasklets=count, hold_ms=time_ms, mode=Mode.TEMPORAL)


class _Choice:
    """Among the ways to share one iteration. ``step_ms``: what its batch takes on all SMs."""

    def __init__(self, costs: Costs, snapshot: Snapshot, job: JobView, step_ms: float) -> None:
        self._costs = costs
        self._snapshot = snapshot
        self._job = job
        self._step_ms = step_ms
        self._hold_ms = min(_MOST_HOLD_MS, _HOLD_SHARE * snapshot.slo.ttft_ms)
        in_flight = snapshot.in_flight
        self._num_ahead = 0 if in_flight is None else 1
        # Until this batch begins.
        ahead_ms = 0.0 if in_flight is None else flight_ms(costs.predictor, in_flight) or step_ms
        self._ahead_ms = snapshot.wait_ms + ahead_ms
        self._slack_ms = self._slack_at(snapshot.margin)
        self._behind = fill(self._costs, job.upcoming, self._behind_ms(self._slack_ms))
        speed = self._behind.alone_ms / self._behind.added_ms if self._behind.added_ms > 0 else 1.0
        most_ms = snapshot.slo.max_gap_ms - step_ms
        worth = max(_LEAST_SLACK_WORTH, 1.0 - _LOST_MS / max(_LOST_MS, most_ms))
        # Slack that no later iteration can use costs nothing.
        self._price = 0.0 if self._slack_ms >= most_ms else worth * speed
        # Without partitions all plans but those without tasklets are alike in what they cost besides, and with new
        # requests there is no slack that could be saved up. The little that is left to the end of a training step has
        # to be done at some time, whatever that costs.
        is_free = not snapshot.partitions or snapshot.batch.prefill_tokens > 0 or self._behind.is_all
        self._leaving_ms = 0.0 if is_free else _LEAVING_MS

    def best(self) -> Plan | None:
        """None: nothing that is worth its slack."""
        best, best_score = None, -self._price * self._changing_ms(None)
        last, least_ms = None, math.inf
        for candidate in self._candidates():
            if candidate.gained_ms is None:
                return candidate.make()
            score = candidate.gained_ms - self._price * candidate.added_ms
            if score > best_score:
                best, best_score = candidate, score
            if candidate.is_all and candidate.added_ms < least_ms:
                last, least_ms = candidate, candidate.added_ms
        if best is None:
            # The end of a training step has to be run at some time, whatever that costs: until then nothing else is.
            best = last
        return None if best is None else best.make()

    def _candidates(self) -> Iterator[_Candidate]:
        snapshot, upcoming = self._snapshot, self._job.upcoming
        if self._behind.num_tasklets:
            yield self._in_time(self._behind)
        if snapshot.batch.prefill_tokens:
            return
        if snapshot.can_fuse and upcoming and self._job.next_shape.kind is TaskletKind.FORWARD:
            fused = fill(self._costs, upcoming, self._behind_ms(self._slack_ms), fuse=True)
            if fused.num_fused:
                yield self._in_time(fused)
        if not snapshot.partitions:
            return
        fitting = self._fitting(in_each(self._costs, snapshot.partitions, upcoming, self._step_ms))
        unknown = [shared for shared in fitting if not shared.is_known]
        if unknown:
            yield _Candidate(partial(in_space, min(unknown, key=attrgetter("step_ms"))), None, 0.0)
        elif fitting:
            shared = max(fitting, key=self._worth)
            yield self._in_space(shared)
            yield from self._in_space_and_time(shared)
            whole = [each for each in fitting if each.is_all]
            if whole and not shared.is_all:
                yield self._in_space(min(whole, key=attrgetter("step_ms")))

    def _in_time(self, filling: Filling) -> _Candidate:
        make = partial(in_time, self._step_ms, filling.num_tasklets, filling.num_fused, filling.added_ms, self._hold_ms)
        return _Candidate(make, filling.alone_ms or None, filling.added_ms + self._leaving_ms, filling.is_all)

    def _in_space(self, shared: Beside) -> _Candidate:
        added_ms = shared.step_ms - self._step_ms + self._changing_ms(shared.partition)
        return _Candidate(partial(in_space, shared), shared.alone_ms, added_ms, shared.is_all)

    def _slack_at(self, margin: float) -> float:
        """The requests' slack behind this batch, in milliseconds, with that share of the TPOT target aimed at."""
        snapshot = self._snapshot
        begin_s = snapshot.now_s + self._ahead_ms / 1e3
        return decode_slack_ms(snapshot.requests, snapshot.slo, begin_s, self._step_ms, margin, self._num_ahead)

    def _fitting(self, found: list[Beside]) -> list[Beside]:
        """Of the steps in partitions those that make no request too late."""
        snapshot, slo = self._snapshot, self._snapshot.slo
        # What prompts take off the margin for now is of no account for the tokens that there are: each request would be
        # late for them at once. Those to come are held to it: no step takes longer, but by what slack there is even so.
        learned = snapshot.margin + snapshot.taken_off
        # Behind a step, tasklets delay the next token; beside it, this one.
        token_ms = token_slack_ms(
            snapshot.requests, slo, snapshot.now_s, learned, self._num_ahead, snapshot.least_answer
        )
        # Nor more than an equal share of that: what is in flight may take longer than it was to.
        most_ms = min(token_ms - self._ahead_ms, token_ms / (1 + self._num_ahead), slo.max_gap_ms)
        target_ms, in_time_ms = learned * slo.tpot_ms, self._step_ms + self._slack_ms
        most_late_ms = _MOST_LATE_TARGETS * slo.tpot_ms
        if snapshot.taken_off > 0.0:
            most_ms = min(most_ms, max(snapshot.margin * slo.tpot_ms, in_time_ms))
            in_time_ms = self._step_ms + self._slack_at(learned)

        fitting = []
        for shared in found:
            step_ms = shared.step_ms
            if step_ms > most_ms:
                continue
            # Tasklets use slack up as it comes. The next tokens make up for what this one is late, if they are in time
            # in the same partition; a trial is over soon.
            next_ms = step_ms if shared.is_known else self._step_ms
            late_ms = _CATCHING_UP_TOKENS * (target_ms - next_ms) if next_ms < target_ms else 0.0
            late_ms = min(late_ms, most_late_ms)
            if step_ms > target_ms and shared.is_known and self._is_other(shared.partition):  # to stay for a while
                late_ms -= (_STEPS_IN_PARTITION - 1) * (step_ms - target_ms)
            if step_ms <= in_time_ms + late_ms:
                fitting.append(shared)
        return fitting

    def _worth(self, shared: Beside) -> float:
        return shared.alone_ms - self._price * (shared.step_ms + self._changing_ms(shared.partition))

    def _in_space_and_time(self, shared: Beside) -> Iterator[_Candidate]:
        """With tasklets behind the step, too: they wait for the one in flight, which ends where it began."""
        added_ms = shared.step_ms + shared.rest_ms - self._step_ms
        behind_ms = self._behind_ms(self._slack_ms - added_ms)
        if behind_ms <= 0:
            return
        upcoming = after(self._job.upcoming, shared.num_tasklets + 1, self._costs.behind)
        rest = fill(self._costs, upcoming, behind_ms)
        if rest.num_tasklets and rest.alone_ms > 0:
            gained_ms = shared.alone_ms + shared.rest_alone_ms + rest.alone_ms
            make = partial(in_space, shared, rest.num_tasklets, shared.rest_ms + rest.added_ms, self._hold_ms)
            yield _Candidate(make, gained_ms, added_ms + rest.added_ms + self._leaving_ms, rest.is_all)

    def _behind_ms(self, slack_ms: float) -> float:
        """Of this slack, what tasklets behind a batch may take."""
        return slack_ms - _LEAVING_MS if self._snapshot.partitions else slack_ms

    def _changing_ms(self, partition: Partition | None) -> float:
        """What it costs that a batch with other SMs is in flight, shared by those that follow."""
        return self._leaving_ms / _STEPS_IN_PARTITION if self._is_other(partition) else 0.0

    def _is_other(self, partition: Partition | None) -> bool:
        """Whether a batch is in flight on other SMs."""
        in_flight = self._snapshot.in_flight
        return in_flight is not None and in_flight.partition != partition
