"""The way of sharing that gets training furthest within the requests' slack, chosen at each iteration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from cotenant.core.plan import Partition, Plan, Snapshot
from cotenant.core.tasklet import TaskletKind
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.scheduler.base import serving_alone, training_alone, waits_longer
from cotenant.scheduler.planner import Filling, fill, in_time
from cotenant.scheduler.slack import decode_slack_ms, token_slack_ms
from cotenant.scheduler.space import Beside, after, in_each, in_space

# What a millisecond of slack is worth in training, as a share of what tasklets behind a step make of it. Below 1: slack
# is no good unspent. Not by much: a way of sharing that wastes time is to wait until there is more slack to spend.
_SLACK_WORTH = 0.9
# Where a batch has other SMs than the one before, or tasklets behind it, the next cannot be launched ahead of it: the
# device then waits for the host about as long as this. It takes some tasklets behind a step to be worth that, and some
# steps in a partition.
_LEAVING_MS = 1.5
_STEPS_IN_PARTITION = 8
# A step in a partition may make requests late by what so many tokens can make up for.
_CATCHING_UP_TOKENS = 4


class _Candidate(NamedTuple):
    """A plan, how far it gets training (time that this would take alone), and what it adds to a step with all SMs.
    ``gained_ms`` None: not known yet, and so worth trying."""

    plan: Plan
    gained_ms: float | None
    added_ms: float


class AdaptivePolicy:
    """Slack is counted for each request, and aimed at with the margin that the requests so far have taught. Ways of
    filling it are compared, and the one is taken that gets training furthest, the slack that it takes being counted at
    what tasklets behind a step would make of it:

    - tasklets behind the decode step (temporal),
    - forward layers inside it, where a job's can be (fused),
    - the step on a part of the SMs and tasklets on the others (spatial), alone or with tasklets behind it.

    Beside prompts it is the first of these, if all of them end with the batch: tasklets behind it delay no first token.
    Prompts that need more batches, and requests that wait for a place in one, have the device to themselves.
    """

    def __init__(self, predictor: LatencyPredictor) -> None:
        self._predictor = predictor

    def plan(self, snapshot: Snapshot) -> Plan:
        if snapshot.batch.empty:
            return training_alone(snapshot)
        if snapshot.job is None or waits_longer(snapshot):
            return serving_alone(self._predictor, snapshot)
        step_ms = self._predictor.batch_ms(snapshot.batch, beside_training=True)
        if step_ms is None:
            return serving_alone(self._predictor, snapshot)
        slack_ms = decode_slack_ms(snapshot.requests, snapshot.slo, snapshot.now_s, step_ms, snapshot.margin)
        filling = fill(self._predictor, snapshot.batch, snapshot.job.upcoming, _behind_ms(snapshot, slack_ms))
        speed = filling.alone_ms / filling.added_ms if filling.added_ms > 0 else 1.0
        # Slack that no later iteration can use costs nothing.
        price = 0.0 if slack_ms >= snapshot.slo.max_gap_ms - step_ms else _SLACK_WORTH * speed
        # The little that is left to the end of a training step has to be done at some time, whatever that costs.
        ends_step = filling.is_all
        best, best_score = None, 0.0 if ends_step else -price * _leaving_ms(snapshot, None)
        for candidate in self._candidates(snapshot, filling, price, step_ms, slack_ms):
            if candidate.gained_ms is None:
                return candidate.plan
            plan, added_ms = candidate.plan, candidate.added_ms
            if not ends_step:
                has_behind = plan.num_tasklets > plan.num_beside
                added_ms += _leaving_ms(snapshot, plan.partition, has_behind=has_behind)
            score = candidate.gained_ms - price * added_ms
            if score > best_score:
                best, best_score = candidate.plan, score
        return best or serving_alone(self._predictor, snapshot)

    def _candidates(
        self, snapshot: Snapshot, filling: Filling, price: float, step_ms: float, slack_ms: float
    ) -> Iterator[_Candidate]:
        """``filling``: of the slack behind the step. ``price``: what a millisecond of slack counts for."""
        assert snapshot.job is not None
        batch, upcoming = snapshot.batch, snapshot.job.upcoming
        if filling.num_tasklets:
            yield _in_time(filling, step_ms)
        if batch.prefill_tokens:
            return
        if snapshot.can_fuse and upcoming and upcoming[0].shape.kind is TaskletKind.FORWARD:
            fused = fill(self._predictor, batch, upcoming, _behind_ms(snapshot, slack_ms), fuse=True)
            if fused.num_fused:
                yield _in_time(fused, step_ms)
        if not snapshot.partitions:
            return
        found = in_each(self._predictor, snapshot, upcoming, step_ms)
        # Behind a step, tasklets delay the next token; beside it, this one.
        num_ahead = 0 if snapshot.in_flight is None else 1
        token_ms = token_slack_ms(snapshot.requests, snapshot.slo, snapshot.now_s, snapshot.margin, num_ahead)
        most_ms = min(token_ms / (1 + num_ahead), snapshot.slo.max_gap_ms)
        target_ms = snapshot.margin * snapshot.slo.tpot_ms

        def fits(shared: Beside) -> bool:
            # Tasklets use slack up as it comes. The next tokens make up for what this one is late, if they are in time
            # in the same partition; a trial is over soon.
            later_ms = shared.step_ms if shared.is_known else step_ms
            late_ms = _CATCHING_UP_TOKENS * max(0.0, target_ms - later_ms)
            if shared.is_known and _is_other(snapshot, shared.partition):  # to stay there for a while
                late_ms -= (_STEPS_IN_PARTITION - 1) * max(0.0, shared.step_ms - target_ms)
            return shared.step_ms <= min(step_ms + slack_ms + late_ms, most_ms)

        def score(shared: Beside) -> float:
            return shared.alone_ms - price * (shared.step_ms + _leaving_ms(snapshot, shared.partition))

        fitting = [shared for shared in found if shared.is_known and fits(shared)]
        unknown = [shared for shared in found if not shared.is_known and fits(shared)]
        if unknown:
            yield _Candidate(in_space(min(unknown, key=lambda each: each.step_ms)), None, 0.0)
        elif fitting:
            shared = max(fitting, key=score)
            yield _Candidate(in_space(shared), shared.alone_ms, shared.step_ms - step_ms)
            yield from self._in_space_and_time(snapshot, shared, step_ms, slack_ms)

    def _in_space_and_time(
        self, snapshot: Snapshot, shared: Beside, step_ms: float, slack_ms: float
    ) -> Iterator[_Candidate]:
        """With tasklets behind the step, too: they wait for the one in flight, which ends where it began."""
        assert snapshot.job is not None
        added_ms = shared.step_ms + shared.rest_ms - step_ms
        left = after(snapshot.job.upcoming, shared.num_tasklets + 1)
        rest = fill(self._predictor, snapshot.batch, left, _behind_ms(snapshot, slack_ms - added_ms))
        if rest.num_tasklets and rest.alone_ms > 0:
            gained_ms = shared.alone_ms + shared.rest_alone_ms + rest.alone_ms
            plan = in_space(shared, rest.num_tasklets, shared.rest_ms + rest.added_ms)
            yield _Candidate(plan, gained_ms, added_ms + rest.added_ms)


def _in_time(filling: Filling, step_ms: float) -> _Candidate:
    plan = in_time(step_ms, filling.num_tasklets, filling.num_fused, filling.added_ms)
    return _Candidate(plan, filling.alone_ms or None, filling.added_ms)


def _behind_ms(snapshot: Snapshot, slack_ms: float) -> float:
    """Of this slack, what tasklets behind a batch may take."""
    return slack_ms - _LEAVING_MS if snapshot.partitions else slack_ms


def _leaving_ms(snapshot: Snapshot, partition: Partition | None, *, has_behind: bool = False) -> float:
    """What it costs that the host does not run ahead of a batch in ``partition``, or with tasklets behind it. Without
    partitions all plans but those without tasklets are alike in that, and with new requests there is no slack that
    could be saved up."""
    if not snapshot.partitions or snapshot.batch.prefill_tokens:
        return 0.0
    if has_behind:
        return _LEAVING_MS
    return _LEAVING_MS / _STEPS_IN_PARTITION if _is_other(snapshot, partition) else 0.0


def _is_other(snapshot: Snapshot, partition: Partition | None) -> bool:
    """Whether a batch is in flight on other SMs."""
    return snapshot.in_flight is not None and snapshot.in_flight.partition != partition
