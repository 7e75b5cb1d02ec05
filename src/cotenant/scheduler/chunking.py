"""How many prompt tokens a batch may take along with its decodes.

A large chunk serves prompts best: fewer steps, larger products. It makes the running requests wait, though, and TPOT
is a mean over each of them. So a chunk may be as large as the running requests' slack, and never so small that its
step is shorter than what TPOT allows for every step. With the decodes it fills tiles of matrix products: a batch that
ends within one takes as long as one that fills it.

The first tile costs most. So where the slack is enough for a tile or two, prompts get further if they wait for a few
steps, which leave some of the target, and have a larger chunk then.

Training takes the same slack. Where it takes all of it, prompts go by the smallest chunks, each of which costs a step
that no training shares; so where prompts come it leaves them a little.
"""

from __future__ import annotations

import math

from cotenant.core.plan import BatchShape, InFlight, RequestView, Slo, causal_pairs
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.predictor.shapes import TILE
from cotenant.scheduler.base import flight_ms

# A step may always take this share of the TPOT target, and a request's steps on average this one: the rest is for what
# the worker cannot see. Time that requests are ahead can be measured again before it is spent; a request without any
# may have nothing but such steps.
_STEP_SHARE, _MEAN_SHARE = 0.9, 0.975
# Of a decode step's time, how much training leaves of each token's for prompts. The longer a step is against the
# target, the fewer prompt tokens fit beside it into the smallest chunk. With much more, training gets less for it.
_LEFT_FOR_PROMPTS = 0.05
# A request with fewer tokens than this, and fewer than half of what it may have and of a short answer, has time to
# catch up: its slack does not count yet.
_MOST_UNCOUNTED = 16
# A budget is a number of whole tiles, which also keeps it from moving by a token, for every plan would be made anew.
# What is left of the target has room for a little of the last tile.
_BEYOND = TILE // 4
_LEAST_TOKENS = 64  # of prompts: they are never shut out
# Prompts wait for a larger chunk that has so many times the tokens for each millisecond, but for no more batches than
# this one after the other: what is predicted of the steps between may be wrong.
_WORTH_WAITING, _MOST_WAITS = 1.1, 4
_MOST_TILES_MORE = 8


def step_limit_ms(
    requests: tuple[RequestView, ...], slo: Slo, now_s: float, short: int, ahead_ms: float = 0.0, num_ahead: int = 0
) -> float:
    """How long the next step may take for those who are running. ``short``: tokens of a short answer, see
    ``AnswerLengths``. ``ahead_ms``: what ``num_ahead`` batches in flight take of the same slack before."""
    least_ms, most_ms = _STEP_SHARE * slo.tpot_ms, slo.max_gap_ms
    slacks_ms = [
        (request.first_token_s - now_s) * 1e3
        - ahead_ms
        + (request.num_generated + num_ahead) * _MEAN_SHARE * slo.tpot_ms
        for request in requests
        if request.first_token_s is not None
        and request.num_generated >= _counts_from(request, short)
        and (request.max_tokens is None or request.num_generated + num_ahead < request.max_tokens)  # has more to come
    ]
    return max(least_ms, min([most_ms, *slacks_ms]))


def most_margin(slo: Slo, step_ms: float) -> float:
    """The share of the TPOT target that training may aim at where prompts come into answers whose steps take
    ``step_ms``."""
    return _MEAN_SHARE - _LEFT_FOR_PROMPTS * min(1.0, step_ms / slo.tpot_ms)


def _counts_from(request: RequestView, short: int) -> int:
    """The number of its tokens from which a request's slack counts."""
    fewest = short if request.max_tokens is None else min(short, request.max_tokens)
    return max(1, min(_MOST_UNCOUNTED, fewest // 2))


def prompt_budget(
    predictor: LatencyPredictor,
    decodes: BatchShape,
    requests: tuple[RequestView, ...],
    slo: Slo,
    now_s: float,
    most: int,
    short: int,
    ahead: InFlight | None = None,
) -> int:
    """Tokens for one batch, decodes included, at most ``most``: about as many as fit the running requests' slack.

    ``decodes``: the batch without prompts. ``short``: see ``AnswerLengths``. ``ahead``: the batch in flight.
    """
    num_decode = decodes.num_decode
    if num_decode == 0:
        return most
    num_ahead = 0 if ahead is None else 1
    # Where nobody knows: as long as its tokens may take.
    ahead_ms = 0.0 if ahead is None else flight_ms(predictor, ahead) or _MEAN_SHARE * slo.tpot_ms
    limit_ms = step_limit_ms(requests, slo, now_s, short, ahead_ms, num_ahead)
    tokens = predictor.prompt_tokens_within(decodes, limit_ms)
    if tokens is None:
        return most
    least = math.ceil((num_decode + _LEAST_TOKENS) / TILE)
    return min(most, max(least, (num_decode + tokens + _BEYOND) // TILE) * TILE)


class PromptBudget:
    """``prompt_budget`` for one batch after the other, some of which prompts let pass to have a larger chunk later."""

    def __init__(self, predictor: LatencyPredictor, slo: Slo) -> None:
        self._predictor = predictor
        self._slo = slo
        self._num_waits = 0  # of the latest batches, those that prompts let pass

    def next(
        self,
        decodes: BatchShape,
        requests: tuple[RequestView, ...],
        now_s: float,
        most: int,
        short: int,
        ahead: InFlight | None = None,
    ) -> int:
        """Tokens for the next batch: ``decodes`` and no more where prompts get further if they wait."""
        tokens = prompt_budget(self._predictor, decodes, requests, self._slo, now_s, most, short, ahead)
        num_left = sum(request.num_prompt_tokens_left for request in requests)
        if tokens < most and self._num_waits < _MOST_WAITS and self._gain_by_waiting(decodes, num_left, tokens):
            self._num_waits += 1
            return decodes.num_decode
        self._num_waits = 0
        return tokens

    def _gain_by_waiting(self, decodes: BatchShape, num_left: int, tokens: int) -> bool:
        """Whether a larger chunk has clearly more tokens a millisecond, and steps without any save up what it takes
        more than this one in time."""
        room = tokens - decodes.num_decode
        step_ms, now_ms = self._predictor.batch_ms(decodes), self._chunk_ms(decodes, room)
        if room >= num_left or step_ms is None or now_ms is None or now_ms <= step_ms:
            return False
        saved_ms = max(0.0, _MEAN_SHARE * self._slo.tpot_ms - step_ms) * (_MOST_WAITS - self._num_waits)
        least_rate = _WORTH_WAITING * room / (now_ms - step_ms)
        for num_tiles in range(1, _MOST_TILES_MORE + 1):
            larger = min(num_left, room + num_tiles * TILE)
            larger_ms = self._chunk_ms(decodes, larger)
            if larger_ms is None or larger_ms > min(now_ms + saved_ms, self._slo.max_gap_ms):
                return False
            if larger >= least_rate * (larger_ms - step_ms):
                return True
            if larger == num_left:
                return False
        return False

    def _chunk_ms(self, decodes: BatchShape, num_tokens: int) -> float | None:
        """A batch with so many tokens of a fresh prompt beside the decodes."""
        pairs = causal_pairs(num_tokens)
        return self._predictor.batch_ms(
            BatchShape(decodes.num_decode, decodes.context_tokens, num_tokens, num_tokens, prefill_pairs=pairs)
        )
