"""How short answers are, learned from those that have ended."""

from __future__ import annotations

from collections import deque

from cotenant.core.request import FinishReason

_REMEMBERED = 256
_SHORT_SHARE, _LEAST_SHARE = 0.05, 0.01
_ENOUGH = 32  # answers, to say what hardly any falls short of
_ON_THE_WAY = 2  # tokens that come after the one at which the API process found a stop string
_AT_FIRST = 8  # tokens
_SORTED_EVERY = 8  # answers
_LONG = 32


class AnswerLengths:
    """``short``: so many tokens at least have all but a twentieth of the latest answers. ``least``: the same of all but
    a hundredth; 0 while too few have ended to tell.

    One that its own limit cut short tells nothing, if it has fewer tokens than a long one (``_LONG``). Nor does one
    that was aborted, by its client or at a stop string, for that the API process finds, but that an answer may end
    about there: it counts for ``least``.
    """

    def __init__(self) -> None:
        self._latest: deque[int] = deque(maxlen=_REMEMBERED)
        self._latest_of_all: deque[int] = deque(maxlen=_REMEMBERED)
        self._num_ended = 0
        self.short, self.least = _AT_FIRST, 0

    def ended(self, num_tokens: int, reason: FinishReason) -> None:
        """An answer has so many tokens and will have no more."""
        if reason is FinishReason.LENGTH and num_tokens < _LONG:
            return
        if reason is FinishReason.ABORT:
            self._latest_of_all.append(max(1, num_tokens - _ON_THE_WAY))
        else:
            self._latest.append(num_tokens)
            self._latest_of_all.append(num_tokens)
        self._num_ended += 1
        if self._num_ended % _SORTED_EVERY == 0:
            self._learn()

    def _learn(self) -> None:
        if self._latest:
            self.short = sorted(self._latest)[int(_SHORT_SHARE * len(self._latest))]
        if len(self._latest_of_all) >= _ENOUGH:
            self.least = sorted(self._latest_of_all)[int(_LEAST_SHARE * len(self._latest_of_all))]
