"""Slack: how much later than at once the next work may be done without a request missing its target.

TPOT is a mean over a request, so a request that was served fast has time to give and one that was served slowly has
none. The gap between two tokens is capped all the same, because a person sees it.
"""

from __future__ import annotations

from cotenant.core.plan import RequestView, Slo

# Targets are aimed at with this share of them. The rest covers what the worker cannot see (HTTP, the client) and the
# error of its predictions.
SAFETY = 0.7
# No planned gap between two tokens is longer than this many TPOT targets.
MAX_GAP_TARGETS = 3.0


def next_token_deadline_s(request: RequestView, slo: Slo, tokens_ahead: int = 1) -> float:
    """When the token ``tokens_ahead`` from now is due, on the snapshot's clock.

    Before its first token a request is due at arrival + TTFT; after it, token n is due n TPOT targets after the first.
    """
    if request.first_token_s is None:
        return request.arrival_s + (SAFETY * slo.ttft_ms + (tokens_ahead - 1) * SAFETY * slo.tpot_ms) / 1e3
    return request.first_token_s + (request.num_generated - 1 + tokens_ahead) * SAFETY * slo.tpot_ms / 1e3


def decode_slack_ms(requests: tuple[RequestView, ...], slo: Slo, now_s: float, step_ms: float) -> float:
    """How long tasklets may run between this decode step and the next one, for the most urgent running request.

    This iteration's tokens leave before its tasklets start, so what the tasklets delay is the token after them. It is
    ready two steps of ``step_ms`` and the tasklets' time from now. Negative when some request is behind already.
    """
    gap_limit_ms = MAX_GAP_TARGETS * slo.tpot_ms - step_ms
    slacks_ms = [
        (next_token_deadline_s(request, slo, tokens_ahead=2) - now_s) * 1e3 - 2 * step_ms
        for request in requests
        if request.first_token_s is not None
    ]
    return min([gap_limit_ms, *slacks_ms])
