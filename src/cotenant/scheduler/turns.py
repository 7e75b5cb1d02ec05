"""Whose prompts wait for others', and where a batch ends, so that as many first tokens as can be are in time.

In the order of arrival one long prompt makes all those late that came behind it. Moore's algorithm ("An n job, one
machine sequencing algorithm for minimizing the number of late jobs", Management Science 15, 1968) makes as few late as
can be, where all may be put off: take them in the order of their deadlines and, whenever one would be late, put the
longest off that was taken so far. Nobody is put off where all are in time, and nobody for ever.

It knows of jobs one after the other. In a batch all first tokens come at its end: so it takes no more prompt tokens
than those have time for that end with it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import groupby, pairwise
from operator import attrgetter
from typing import NamedTuple

from cotenant.core.plan import BatchShape, RequestView, Slo, causal_pairs
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.predictor.shapes import TILE

# A first token counts as in time by so much of its target: the rest is for what the worker cannot see.
_IN_TIME = 0.95
# Who has waited for so many targets has its turn, whoever else is late for that.
_MOST_TARGETS = 4.0


class Turns(NamedTuple):
    """``put_off``: ids of requests whose prompts are to wait for the others' of their class: they are late, for others'
    sake or in any case. ``budget``: tokens of the next batch at most, with its decodes."""

    put_off: frozenset[str]
    budget: int


def take_turns(
    predictor: LatencyPredictor,
    decodes: BatchShape,
    prompts: list[RequestView],
    slo: Slo,
    now_s: float,
    budget: int,
    begins_ms: float = 0.0,
    num_seats: int | None = None,
) -> Turns:
    """The turns of ``prompts`` (see ``prompts_of``), which are in the order in which they are served: by priority, then
    by arrival.

    ``budget``: tokens of the next batch at most, with its ``decodes``; ``begins_ms``: from now until it begins;
    ``num_seats``: how many can begin with it (None: all).
    """
    if len(prompts) < 2:
        return Turns(frozenset(), budget)
    token_ms = _token_ms(predictor, decodes, _tokens_of(prompts, budget - decodes.num_decode))
    if token_ms is None:
        return Turns(frozenset(), budget)
    target_s = slo.ttft_ms / 1e3
    judge = _Judge(now_s + begins_ms / 1e3, token_ms / 1e3, _IN_TIME * target_s, now_s - _MOST_TARGETS * target_s)
    classes = _classes_of(prompts)
    begin_s = judge.begin_s
    late = judge.late(classes[0], begin_s)
    for before, of_class in pairwise(classes):
        begin_s += sum([each.num_prompt_tokens_left for each in before]) * judge.token_s
        late += judge.late(of_class, begin_s)
    put_off = frozenset(late)
    order = _in_turn(classes, put_off)
    if num_seats is not None:
        order = _seated(order, num_seats)
    return Turns(put_off, judge.budget(order, put_off, prompts[-1].priority, decodes.num_decode, budget))


def _tokens_of(prompts: list[RequestView], most: int) -> int:
    """What they have left, ``most`` at most."""
    num_tokens = 0
    for request in prompts:
        num_tokens += request.num_prompt_tokens_left
        if num_tokens >= most:
            return most
    return num_tokens


def _classes_of(prompts: list[RequestView]) -> list[list[RequestView]]:
    """One list for each priority, by which they are in order before anything else."""
    if prompts[0].priority == prompts[-1].priority:  # as it is mostly
        return [prompts]
    return [list(group) for _, group in groupby(prompts, key=attrgetter("priority"))]


def _in_turn(classes: list[list[RequestView]], put_off: frozenset[str]) -> Iterator[RequestView]:
    """As they are served."""
    for requests in classes:
        behind = []
        for request in requests:
            if request.request_id in put_off:
                behind.append(request)
            else:
                yield request
        yield from behind


def _seated(order: Iterator[RequestView], num_seats: int) -> Iterator[RequestView]:
    """Without those that have no seat yet and get none."""
    for request in order:
        if not request.has_begun:
            num_seats -= 1
        if request.has_begun or num_seats >= 0:
            yield request


def _token_ms(predictor: LatencyPredictor, decodes: BatchShape, count: int) -> float | None:
    """What each of ``count`` prompt tokens takes in a batch with these decodes. None where nobody knows."""
    if count <= 0:
        return None
    num_decode, context, num_adapters = decodes.num_decode, decodes.context_tokens, decodes.num_adapters
    batch = BatchShape(num_decode, context, count, count, num_adapters, causal_pairs(count))
    batch_ms = predictor.batch_ms(batch, cautious=False)
    return None if batch_ms is None else batch_ms / count


class _Judge(NamedTuple):
    """Tells whose first tokens are in time where prompts begin at ``begin_s`` and a token of them takes ``token_s``:
    within ``target_s``. Who came before ``patient_since_s`` has waited for long enough."""

    begin_s: float
    token_s: float
    target_s: float
    patient_since_s: float

    def late(self, requests: list[RequestView], free_s: float) -> list[str]:
        """Those of one class that are put off, where the device is free for it at ``free_s``."""
        _, token_s, target_s, patient_since_s = self
        taken: list[tuple[int, int, str]] = []  # a heap of those in time: the longest first, of equal ones the last
        longest = 0  # tokens of its first
        place = 0  # of the last one that came into it: less than all before it had
        late: list[str] = []
        for request in requests:
            num_left, arrival_s = request.num_prompt_tokens_left, request.arrival_s
            end_s, due_s = free_s + num_left * token_s, arrival_s + target_s
            # Who had its first token, and is computed again, has its others to give.
            if arrival_s < patient_since_s or request.first_token_s is not None:
                free_s = end_s
            elif end_s <= due_s:
                free_s = end_s
                place -= 1
                heapq.heappush(taken, (-num_left, place, request.request_id))
                longest = -taken[0][0]
            # Behind one that must not wait it may be late even so: then nobody is put off for it.
            elif longest > num_left and end_s - longest * token_s <= due_s:
                free_s = end_s - longest * token_s
                place -= 1
                late.append(heapq.heapreplace(taken, (-num_left, place, request.request_id))[-1])
                longest = -taken[0][0]
            else:
                late.append(request.request_id)
        return late

    def budget(
        self, order: Iterator[RequestView], put_off: frozenset[str], last_priority: int, num_decode: int, most: int
    ) -> int:
        """Tokens of the next batch, which takes prompts in this order: as many as leave those in time that end with it,
        and ``most`` at most. In whole tiles, for a batch that ends within one takes as long as one that fills it.
        ``last_priority``: of the last class."""
        begin_s, token_s, target_s, patient_since_s = self
        num_tokens = num_decode
        for request in order:
            num_tokens += request.num_prompt_tokens_left
            if num_tokens >= most:
                break
            is_due = request.first_token_s is None and request.arrival_s >= patient_since_s
            if is_due and request.request_id not in put_off:
                time_s = request.arrival_s + target_s - begin_s
                tokens = num_decode + int(min(most + TILE, time_s / token_s))  # a target may be any number
                most = min(most, max(num_tokens, tokens // TILE * TILE or tokens))
                if request.priority == last_priority:
                    break  # those behind it have come and end no earlier: they take nothing off
        return most
