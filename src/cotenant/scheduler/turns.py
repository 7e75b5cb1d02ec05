"""Whose prompts wait for others', where not all first tokens can be in time.

In the order of arrival one long prompt makes all those late that came behind it. Moore's algorithm ("An n job, one
machine sequencing algorithm for minimizing the number of late jobs", Management Science 15, 1968) makes as few late as
can be: take them in the order of their deadlines and, whenever one would be late, put the longest off that was taken so
far. Nobody is put off where all are in time, and nobody for ever.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import groupby

from cotenant.core.plan import BatchShape, RequestView, Slo, causal_pairs
from cotenant.predictor.predictor import LatencyPredictor

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
    ahead_ms: float = 0.0,
) -> frozenset[str]:
    """Those of ``requests``, which are in the order in which they are served, whose prompts are to wait for the others'
    of their class: as few as let the others' first tokens be in time.

    ``budget``: tokens of the next batch at most, with its ``decodes``; ``ahead_ms``: until it begins.
    """
    waiting = [request for request in requests if request.num_prompt_tokens_left]
    if len(waiting) < 2:
        return frozenset()
    num_left = sum(each.num_prompt_tokens_left for each in waiting)
    token_ms = _token_ms(predictor, decodes, min(num_left, budget - decodes.num_decode))
    if token_ms is None:
        return frozenset()
    found: list[str] = []
    free_s = now_s + ahead_ms / 1e3  # when the device is done with the classes before, and with whom must not wait
    for _, group in groupby(waiting, key=lambda request: request.priority):
        of_class = list(group)
        found += _late(of_class, slo, now_s, free_s, token_ms / 1e3)
        free_s += sum(each.num_prompt_tokens_left for each in of_class) * token_ms / 1e3
    return frozenset(found)


def _token_ms(predictor: LatencyPredictor, decodes: BatchShape, count: int) -> float | None:
    """What each of ``count`` prompt tokens takes in a batch with these decodes. None where nobody knows."""
    if count <= 0:
        return None
    batch = BatchShape(decodes.num_decode, decodes.context_tokens, count, count, 0, causal_pairs(count))
    batch_ms = predictor.batch_ms(batch, cautious=False)
    return None if batch_ms is None else batch_ms / count


def _late(requests: list[RequestView], slo: Slo, now_s: float, free_s: float, token_s: float) -> Iterator[str]:
    """Of one class."""
    taken: list[tuple[int, str]] = []  # a heap of those in time, the longest first
    patience_s, target_s = _MOST_TARGETS * slo.ttft_ms / 1e3, _IN_TIME * slo.ttft_ms / 1e3
    for request in requests:
        num_left = request.num_prompt_tokens_left
        free_s += num_left * token_s
        # Who had its first token, and is computed again, has its others to give.
        if request.first_token_s is not None or now_s - request.arrival_s > patience_s:
            continue
        heapq.heappush(taken, (-num_left, request.request_id))
        if free_s > request.arrival_s + target_s:
            longest, request_id = heapq.heappop(taken)
            free_s += longest * token_s
            yield request_id
