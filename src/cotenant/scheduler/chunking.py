"""How many prompt tokens a batch may take along with its decodes.

A large chunk serves prompts best: fewer steps, larger products. It makes the running requests wait, though, and TPOT
is a mean over each of them. So a chunk may be as large as the running requests' slack, and never so small that its
step is shorter than what TPOT allows for every step. With the decodes it fills tiles of matrix products: a batch that
ends within one takes as long as one that fills it.
"""

from __future__ import annotations

from cotenant.core.plan import RequestView, Slo
from cotenant.predictor.predictor import LatencyPredictor

# Steps aim at this share of the TPOT target; the rest is for what the worker cannot see.
_STEP_SHARE = 0.9
# A request with fewer tokens than this, and fewer than half of all that it may have, has time to catch up: its slack
# does not count yet.
_MIN_TOKENS = 16
# Rows of a tile of matrix products. A budget is the nearest number of whole ones, which also keeps it from moving by a
# token, for every plan would be made anew.
TILE = 128
_LEAST_TOKENS = 64  # of prompts: they are never shut out


def step_limit_ms(requests: tuple[RequestView, ...], slo: Slo, now_s: float) -> float:
    """How long the next step may take for those who are running."""
    least_ms, most_ms = _STEP_SHARE * slo.tpot_ms, slo.max_gap_ms
    slacks_ms = [
        (request.first_token_s - now_s) * 1e3 + request.num_generated * _STEP_SHARE * slo.tpot_ms
        for request in requests
        if request.first_token_s is not None and request.num_generated >= _counts_from(request)
    ]
    return max(least_ms, min([most_ms, *slacks_ms]))


def _counts_from(request: RequestView) -> int:
    """The number of its tokens from which a request's slack counts."""
    return _MIN_TOKENS if request.max_tokens is None else min(_MIN_TOKENS, request.max_tokens // 2)


def prompt_budget(
    predictor: LatencyPredictor,
    num_decode: int,
    context_tokens: int,
    requests: tuple[RequestView, ...],
    slo: Slo,
    now_s: float,
    most: int,
) -> int:
    """Tokens for one batch, decodes included, at most ``most``: about as many as fit the running requests' slack.

    ``num_decode`` and ``context_tokens``: what will decode in it (see ``BatchShape``).
    """
    if num_decode == 0:
        return most
    tokens = predictor.prompt_tokens_within(num_decode, context_tokens, step_limit_ms(requests, slo, now_s))
    if tokens is None:
        return most
    return min(most, max(num_decode + _LEAST_TOKENS, round((num_decode + tokens) / TILE) * TILE))
