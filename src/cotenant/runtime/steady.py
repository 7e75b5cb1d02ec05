"""When sequences that decode steadily are timed, and how long they become."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.core.plan import Slo
from cotenant.runtime.load import Answer

# Steady decoding is measured once each sequence has so many tokens and is well within the target, or has so many more.
SETTLED_TOKENS, _MOST_SETTLING = 16, 512
# Nor before each has so many, the last of them under the policy, which spend what the first have saved up: so all
# policies are timed over the same contexts. Sequences that are to be shorter than that are timed as soon as may be.
_UNTIMED, _UNDER_POLICY = 640, 384
_WELL_WITHIN = 0.8  # of the TPOT target, by the mean gap so far
# Before that, others decode so many tokens at a time under the policy, until the margin rises by less than this
# meanwhile, but not for ever: slack that was saved up while it was lower would make TPOT look longer than it is, and
# training faster.
LEARNING_TOKENS, _MOST_LEARNING_TOKENS, LEAST_RISE = 64, 1536, 0.001
_PROFILE_UNTIMED = 64  # tokens of each sequence at least, for one partition after the other


def steady_len(batch_size: int, context: int, num_tokens: int) -> int:
    """Tokens of the longest sequence that ``ColocateBench.steady`` may come to."""
    before = SETTLED_TOKENS + _MOST_SETTLING + _UNDER_POLICY
    start, num_untimed = timed_from(context, num_tokens)
    return start - num_untimed + before + num_tokens + 2 * batch_size


def profile_len(batch_size: int, context: int, num_tokens: int) -> int:
    """The same of ``ColocateBench.profile``."""
    before = SETTLED_TOKENS + _MOST_SETTLING + _PROFILE_UNTIMED
    return timed_from(context, num_tokens)[0] + before + num_tokens + 2 * batch_size


def shortest_context(num_tokens: int) -> int:
    """Around which so many tokens of each sequence are timed over the same contexts under all policies."""
    return _UNTIMED + 1 + num_tokens // 2


def timed_from(context: int, num_tokens: int) -> tuple[int, int]:
    """From how many tokens of a sequence on, and how many of them are behind its prompt."""
    start = max(1, context - num_tokens // 2)
    return start, min(_UNTIMED, start - 1)


def settled_from(num_untimed: int) -> int:
    """How many tokens of those behind a prompt that are not timed come before the policy's turn."""
    return max(0, num_untimed - _UNDER_POLICY)


def learning_len(batch_size: int) -> int:
    """Tokens of the longest sequence that teaches a margin."""
    return 1 + SETTLED_TOKENS + _MOST_LEARNING_TOKENS + 2 * batch_size


def most_learning(answers: Sequence[Answer], limit: int) -> int:
    """How many times ``LEARNING_TOKENS`` these sequences may decode, each behind a prompt of one token, where there is
    room for ``limit`` tokens of each."""
    room = limit - 1 - max(len(answer.token_s) for answer in answers) - 2 * len(answers)
    return max(0, min(_MOST_LEARNING_TOKENS, room)) // LEARNING_TOKENS


def are_settled(answers: Sequence[Answer], slo: Slo, least: int) -> bool:
    """Whether all have ``least`` tokens, are well within the target or have had long enough."""
    counts = [len(answer.token_s) for answer in answers]
    if min(counts) < max(SETTLED_TOKENS, least):
        return False
    tpots_ms = [(answer.token_s[-1] - answer.token_s[0]) * 1e3 / (len(answer.token_s) - 1) for answer in answers]
    return max(tpots_ms) <= _WELL_WITHIN * slo.tpot_ms or min(counts) >= SETTLED_TOKENS + _MOST_SETTLING
