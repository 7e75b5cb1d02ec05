"""Slack: how much later than at once the next work may be done without a request missing its target.

TPOT is a mean over a request, so a request that was served fast has time to give and one that was served slowly has
none. The gap between two tokens is capped all the same, because a person sees it.
"""

from __future__ import annotations

import math

from cotenant.core.plan import RequestView, Slo

# The share of a target that is aimed at where no margin is learned. The rest covers what the worker cannot see (HTTP,
# the client) and the error of its predictions.
SAFETY = 0.7
# The most that is aimed at where one is learned. What the worker cannot see does not grow with an answer: of a long one
# one token's target is kept, and so little more that any long stretch of it is in time by itself, wherever it begins.
MOST_MARGIN = 0.98
_LONG_MARGIN = 0.997
_LONG = round(1 / (_LONG_MARGIN - MOST_MARGIN))
# Of the target, for a token that is the last: the rest is for what the worker cannot see, for nothing else is to come.
# No less than what is aimed at where prompts come (`chunking.most_margin`), or each answer would end there with a step
# that nothing shares.
_LAST_SHARE = 0.975
_LAST_KEPT = 0.5  # of one token's target, in a long answer where the margin is as large as can be
_SHORT = 8  # tokens; a longer answer has time to catch up, most likely


def decode_slack_ms(
    requests: tuple[RequestView, ...],
    slo: Slo,
    now_s: float,
    step_ms: float,
    margin: float = SAFETY,
    num_ahead: int = 0,
) -> float:
    """How long tasklets may run between this batch and the next one, for the most urgent request. With ``num_ahead``
    batches in flight ``now_s`` is when they will have landed.

    Token n of a request is due n TPOT targets after its first, or the share ``margin`` of that; a target before the
    share ``_LONG_MARGIN``, if that is later and the margin as large as can be. This iteration's tokens leave before its
    tasklets start, so what the tasklets delay is the token after them. It is ready two steps of ``step_ms`` and the
    tasklets' time from now. A request that has none yet is one that has its first with this batch, or with one in
    flight, unless it waits for its adapter: its second is due a target later. Negative when some request is behind
    already.
    """
    whole_s = slo.tpot_ms / 1e3
    target_s, long = margin * whole_s, _LONG if margin >= MOST_MARGIN else math.inf
    # The token that is delayed is number num_generated + num_ahead + 2, with so many gaps before it but one.
    first_due_s, has_new, num_gaps = math.inf, False, num_ahead + 1
    for request in requests:
        first_token_s = request.first_token_s
        if first_token_s is None:
            has_new = has_new or not request.waits_for_adapter
            continue
        gaps = request.num_generated + num_gaps
        due_s = first_token_s + (gaps * target_s if gaps < long else (gaps * _LONG_MARGIN - 1) * whole_s)
        if due_s < first_due_s:
            first_due_s = due_s
    slack_ms = min(slo.max_gap_ms - step_ms, (first_due_s - now_s) * 1e3 - 2 * step_ms)
    return min(slack_ms, margin * slo.tpot_ms - step_ms) if has_new else slack_ms


def first_token_slack_ms(requests: tuple[RequestView, ...], slo: Slo, now_s: float, step_ms: float) -> float:
    """What the TTFT target leaves the one that has waited longest for its first token, which comes with a step of
    ``step_ms`` at the earliest. Infinite where nobody waits; negative when it is late already."""
    arrivals_s = [request.arrival_s for request in requests if request.first_token_s is None]
    return slo.ttft_ms - (now_s - min(arrivals_s)) * 1e3 - step_ms if arrivals_s else math.inf


def token_slack_ms(
    requests: tuple[RequestView, ...], slo: Slo, now_s: float, margin: float, num_ahead: int = 0, least: int = 0
) -> float:
    """How long this iteration's tokens may take, and with them ``num_ahead`` batches in flight, for the requests that
    may end with them: nothing makes up later for what they are late. Any request may while it is short, but for those
    that have fewer tokens even then than hardly any answer (``least``, see ``AnswerLengths``). A longer one is held to
    the target at the last token that it may have, whatever the margin is, for that is for what may still come; of a
    long answer half of one token's target is kept, if that is less and the margin as large as can be."""
    whole_s, is_most = slo.tpot_ms / 1e3, margin >= MOST_MARGIN
    first_due_s, num_more = math.inf, num_ahead + 1
    # Most are long and not at their end: planning asks this of each, at each iteration.
    short_or_last = [
        each
        for each in requests
        if each.num_generated < _SHORT
        or (each.max_tokens is not None and each.max_tokens == each.num_generated + num_more)
    ]
    for request in short_or_last:
        first_token_s, max_tokens = request.first_token_s, request.max_tokens
        num_before = request.num_generated + num_ahead  # tokens before this iteration's: as many gaps until it
        if first_token_s is None or (max_tokens is not None and num_before >= max_tokens):
            continue
        if num_before + 1 == max_tokens or num_before + 1 >= least:
            if request.num_generated < _SHORT:
                due = num_before * margin
            elif is_most:
                due = max(num_before * _LAST_SHARE, num_before - _LAST_KEPT)
            else:
                due = num_before * _LAST_SHARE
            first_due_s = min(first_due_s, first_token_s + due * whole_s)
    return (first_due_s - now_s) * 1e3
