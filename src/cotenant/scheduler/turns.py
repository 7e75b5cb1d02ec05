"""Whose prompts wait for others', where not all first tokens can be in time.

In the order of arrival one long prompt makes all those late that came behind it. Moore's algorithm ("An n job, one
machine sequencing algorithm for minimizing the number of late jobs", Management Science 15, 1968) makes as few late as
can be, where all may be put off: take them in the order of their deadlines and, whenever one would be late, put the
longest off that was taken so far. Nobody is put off where all are in time, and nobody for ever.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import groupby

from cotenant.core.plan import BatchShape, InFlight, RequestView, Slo, causal_pairs
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.scheduler.base import flight_ms

# A first token counts as in time by so much of its target: the rest is for what the worker cannot see.
_IN_TIME = 0.95
# Who has waited for so many targets has its turn, whoever else is late for that.
_MOST_TARGETS = 4.0


def put_off(
    predictor: LatencyPredictor,
    decodes: BatchShape,
    requests: tuple[RequestView, ...],
    slo: Slo,
    now_s: float,
    budget: int,
    ahead: InFlight | None = None,
) -> frozenset[str]:
    """Those of ``requests``, which are in the order in which they are served, whose prompts are to wait for the others'
    of their class: they are late, for others' sake or in any case.

    ``budget``: tokens of the next batch at most, with its ``decodes``; ``ahead``: the batch in flight.
    """
    waiting = [request for request in requests if request.num_prompt_tokens_left]
    if len(waiting) < 2:
        return frozenset()
    num_left = sum(each.num_prompt_tokens_left for each in waiting)
    token_ms = _token_ms(predictor, decodes, min(num_left, budget - decodes.num_decode))
    if token_ms is None:
        return frozenset()
    found: list[str] = []
    ahead_ms = 0.0 if ahead is None else flight_ms(predictor, ahead) or 0.0
    free_s = now_s + ahead_ms / 1e3  # when the device is done with the batch in flight, and the classes before
    for _, group in groupby(waiting, key=lambda request: request.priority):
        of_class = list(group)
        found += _late(of_class, slo, now_s, free_s, token_ms / 1e3)
        free_s += sum(each.num_prompt_tokens_left for each in of_class) * token_ms / 1e3
    return frozenset(found)


def _token_ms(predictor: LatencyPredictor, decodes: BatchShape, count: int) -> float | None:
    """What each of ``count`` prompt tokens takes in a batch with these decodes. None where nobody knows."""
    if count <= 0:
        return None
    num_decode, context, num_adapters = decodes.num_decode, decodes.context_tokens, decodes.num_adapters
    batch = BatchShape(num_decode, context, count, count, num_adapters, causal_pairs(count))
    batch_ms = predictor.batch_ms(batch, cautious=False)
    return None if batch_ms is None else batch_ms / count


def _late(requests: list[RequestView], slo: Slo, now_s: float, free_s: float, token_s: float) -> Iterator[str]:
    """``put_off`` of one class, for which the device is free at ``free_s``."""
    taken: list[tuple[int, int, str]] = []  # a heap of those in time: the longest first, of equal ones who came last
    patience_s, target_s = _MOST_TARGETS * slo.ttft_ms / 1e3, _IN_TIME * slo.ttft_ms / 1e3
    for place, request in enumerate(requests):
        num_left = request.num_prompt_tokens_left
        free_s += num_left * token_s
        # Who had its first token, and is computed again, has its others to give.
        if request.first_token_s is not None or now_s - request.arrival_s > patience_s:
            continue
        this, due_s = (-num_left, -place, request.request_id), request.arrival_s + target_s
        if free_s <= due_s:
            heapq.heappush(taken, this)
            continue
        longest = min([this, *taken[:1]])
        # Behind one that must not wait it may be late even so: then nobody is put off for it.
        helps = free_s + longest[0] * token_s <= due_s
        late = heapq.heappushpop(taken, this) if helps else this
        free_s += late[0] * token_s
        yield late[-1]
