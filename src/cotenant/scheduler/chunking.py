"""How many prompt tokens a batch may take along with its decodes.

A large chunk serves prompts best: fewer steps, larger products. It makes the running requests wait, though, and TPOT
is a mean over each of them. So a chunk may be as large as the running requests' slack, and never so small that its
step is shorter than what TPOT allows for every step. Where decodes alone take longer than that, no chunk saves the
target, and prompts get a share of the device all the same: else first tokens would wait without end for nothing. With
the decodes a chunk fills tiles of matrix products: a batch that ends within one takes as long as one that fills it.

Training takes the same slack. Where it takes all of it, prompts go by the smallest chunks, each of which costs a step
that no training shares; so where prompts come it leaves them a little.
"""

from __future__ import annotations

import math

from cotenant.core.plan import BatchShape, InFlight, RequestView, Slo
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.predictor.shapes import TILE
from cotenant.scheduler.base import flight_ms

# A step may always take this share of the TPOT target, and a request's steps on average this one: the rest is for what
# the worker cannot see. Time that requests are ahead can be measured again before it is spent; a request without any
# may have nothing but such steps.
_STEP_SHARE, _MEAN_SHARE = 0.9, 0.975
# Where decodes alone take longer than a request's steps may on average: as much for prompts as they are late, but no
# more than this share of theirs.
_SHARE_OF_LATE = 0.25
# Of a decode step's time, how much training leaves of each token's for prompts. The longer a step is against the
# target, the fewer prompt tokens fit beside it into the smallest chunk. With much more, training gets less for it.
_LEFT_FOR_PROMPTS = 0.03
# A request with fewer tokens than ``_MOST_UNCOUNTED``, and fewer than half of what it may have and of a short answer,
# has time to catch up: its slack does not count yet, unless the prompts that are there take more than ``_ROOM_SHARE``
# of what it can make up for: others come behind them. Then it counts, if they have time themselves; where they have
# none, a step may take that share.
_MOST_UNCOUNTED = 16
_ROOM_SHARE = 0.5
_IN_TIME = 0.9  # of the TTFT target; what `turns` calls in time is a little more
# A budget is a number of whole tiles, which also keeps it from moving by a token, for every plan would be made anew.
# What is left of the target has room for a little of the last tile.
_BEYOND = TILE // 4
# Of the time that a batch may take: what is said of one is its mean, and who has no more is late by any more.
_AIMED_SHARE = 0.97
_LEAST_TOKENS = 64  # of prompts: they are never shut out


def step_limit_ms(
    requests: tuple[RequestView, ...],
    slo: Slo,
    now_s: float,
    short: int,
    ahead_ms: float = 0.0,
    num_ahead: int = 0,
    step_ms: float = 0.0,
    prompts_ms: float = 0.0,
) -> float:
    """How long the next step may take for those who are running. ``short``: tokens of a short answer, see
    ``AnswerLengths``. ``ahead_ms``: what passes of the same slack before, with ``num_ahead`` batches in flight, which
    bring each a token, or its first. ``prompts_ms``: what the prompts that are there take beside decode steps of
    ``step_ms``; 0 if they have no time."""
    least_ms, limit_ms, token_ms = _always_ms(slo, step_ms), slo.max_gap_ms, _MEAN_SHARE * slo.tpot_ms
    counts_from = _counts_from(short)
    for request in requests:
        first_token_s = request.first_token_s
        if first_token_s is None and (num_ahead == 0 or request.num_prompt_tokens_left or not request.has_begun):
            continue  # its first token is not in flight
        num_generated = request.num_generated
        num_tokens = num_generated + num_ahead
        slack_ms = num_tokens * token_ms
        if first_token_s is not None:
            slack_ms += (first_token_s - now_s) * 1e3 - ahead_ms
        if slack_ms >= limit_ms:
            continue
        max_tokens = request.max_tokens
        if max_tokens is not None and num_tokens >= max_tokens:
            continue  # no more to come
        fewest = short if max_tokens is None or max_tokens > short else max_tokens
        # A lower limit of its own can but make it count sooner.
        if num_generated < counts_from and num_generated < _counts_from(fewest):
            # Until the end of so short an answer, for prompts; negative where it is too late in any case.
            room_ms = slack_ms - step_ms + max(0, fewest - 1 - num_tokens) * (token_ms - step_ms)
            given_ms = _ROOM_SHARE * room_ms
            if room_ms < 0.0 or 0.0 < prompts_ms <= given_ms:
                continue
            if not prompts_ms:
                slack_ms = max(slack_ms, step_ms + given_ms)
        limit_ms = min(limit_ms, slack_ms)
        if limit_ms <= least_ms:
            break
    return max(least_ms, limit_ms)


def _always_ms(slo: Slo, step_ms: float) -> float:
    """How long a step may take whatever the slack is, where one of decodes alone takes ``step_ms``."""
    late_ms = step_ms - _MEAN_SHARE * slo.tpot_ms
    return _STEP_SHARE * slo.tpot_ms if late_ms <= 0.0 else step_ms + min(late_ms, _SHARE_OF_LATE * step_ms)


def most_margin(slo: Slo, step_ms: float) -> float:
    """The share of the TPOT target that training may aim at where prompts come into answers whose steps take
    ``step_ms``."""
    return _MEAN_SHARE - _LEFT_FOR_PROMPTS * min(1.0, step_ms / slo.tpot_ms)


def _counts_from(fewest: int) -> int:
    """The number of its tokens from which the slack of a request counts that may have so few."""
    return max(1, min(_MOST_UNCOUNTED, fewest // 2))


def _patient_ms(
    prompts: list[RequestView],
    slo: Slo,
    now_s: float,
    begin_ms: float,
    always_tokens: int,
    least_ms: float,
    token_ms: float,
) -> float:
    """What ``prompts``, all that could run, take at ``token_ms`` a token (milliseconds), if the first tokens of all are
    in time even where batches have ``always_tokens`` of theirs each, which every step has room for, and take
    ``least_ms``; else 0."""
    num_left, in_time_ms = 0, _IN_TIME * slo.ttft_ms
    for request in prompts:
        num_left += request.num_prompt_tokens_left
        waits_ms = (now_s - request.arrival_s) * 1e3 + begin_ms + num_left / always_tokens * least_ms
        if waits_ms > in_time_ms and request.first_token_s is None:
            return 0.0
    return num_left * token_ms


def _tokens_within(
    predictor: LatencyPredictor, decodes: BatchShape, limit_ms: float, first: RequestView | None, most: int
) -> int | None:
    """As many prompt tokens as a batch has time for, at most ``most``, those of ``first`` before others'. None: nobody
    knows."""
    num_computed = 0 if first is None else first.num_computed
    limit_ms *= _AIMED_SHARE
    tokens = predictor.prompt_tokens_within(decodes, limit_ms, num_computed, most=most)
    if first is None or num_computed == 0 or tokens is None or tokens <= first.num_prompt_tokens_left:
        return tokens
    # Most others have nothing computed yet.
    num_computed = num_computed * first.num_prompt_tokens_left // tokens
    return predictor.prompt_tokens_within(decodes, limit_ms, num_computed, most=most)


def prompt_budget(
    predictor: LatencyPredictor,
    decodes: BatchShape,
    requests: tuple[RequestView, ...],
    prompts: list[RequestView],
    slo: Slo,
    now_s: float,
    most: int,
    short: int,
    ahead: InFlight | None = None,
    begins_after_ms: float = 0.0,
) -> int:
    """Tokens for one batch, decodes included, at most ``most``: about as many as fit the running requests' slack.

    ``decodes``: the batch without prompts. ``prompts``: those of ``requests``, see ``prompts_of``. ``short``: see
    ``AnswerLengths``. ``ahead``: the batch in flight. ``begins_after_ms``: how long it takes to begin one where none
    is.
    """
    num_decode = decodes.num_decode
    if num_decode == 0:
        return most
    num_ahead = 0 if ahead is None else 1
    # Where nobody knows: as long as its tokens may take.
    ahead_ms = begins_after_ms if ahead is None else flight_ms(predictor, ahead) or _MEAN_SHARE * slo.tpot_ms
    step_ms = predictor.batch_ms(decodes) or 0.0
    least_ms = _always_ms(slo, step_ms)
    first = prompts[0] if prompts else None
    tokens = _tokens_within(predictor, decodes, least_ms, first, most - num_decode)
    if tokens is None:
        return most
    always_tokens = max(tokens, _LEAST_TOKENS)
    token_ms = max(0.0, _AIMED_SHARE * least_ms - step_ms) / always_tokens
    patient_ms = _patient_ms(prompts, slo, now_s, ahead_ms, always_tokens, least_ms, token_ms)
    limit_ms = step_limit_ms(requests, slo, now_s, short, ahead_ms, num_ahead, step_ms, patient_ms)
    if limit_ms > least_ms:
        tokens = max(tokens, _tokens_within(predictor, decodes, limit_ms, first, most - num_decode) or 0)
    if num_decode + tokens >= most:  # which need not be a number of whole tiles
        return most
    least_tiles = math.ceil((num_decode + _LEAST_TOKENS) / TILE)
    return min(most, max(least_tiles, (num_decode + tokens + _BEYOND) // TILE) * TILE)
