"""How short answers are, learned from those that have ended."""

from __future__ import annotations

from collections import deque

from cotenant.core.request import FinishReason

_REMEMBERED = 256
_SHORT_SHARE = 0.05
_AT_FIRST = 8  # tokens
_SORTED_EVERY = 8  # answers
_LONG = 32


class AnswerLengths:
    """``short``: so many tokens at least have all but a twentieth of the latest answers.

    One that its own limit cut short tells nothing. Nor does one that was aborted, by its client or at a stop string,
    for that the API process finds.
    """

    def __init__(self) -> None:
        self._latest: deque[int] = deque(maxlen=_REMEMBERED)
        self._num_ended = 0
        self.short = _AT_FIRST

    def ended(self, num_tokens: int, reason: FinishReason) -> None:
        """An answer has so many tokens and will have no more."""
        was_cut = reason is FinishReason.LENGTH and num_tokens < _LONG
        if was_cut or reason is FinishReason.ABORT:
            return
        self._latest.append(num_tokens)
        self._num_ended += 1
        if self._num_ended % _SORTED_EVERY == 0:
            self.short = sorted(self._latest)[int(_SHORT_SHARE * len(self._latest))]
