"""Whether two greedy answers to one prompt say the same, as far as arithmetic in half precision can tell.

The kernels that compute a prompt depend on what it is batched with and on what is compiled by then, and their last bits
differ. Where two tokens are as likely as each other, that decides between them, and what follows is another text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Of log-probabilities. Rounding moves them by hundredths; pages of somebody else's text move them by whole numbers.
_TOLERANCE = 0.25


@dataclass(frozen=True, slots=True)
class GreedyAnswer:
    """Token by token, as `/v1/completions` gives them with ``logprobs``."""

    tokens: Sequence[str]
    logprobs: Sequence[float]
    top_logprobs: Sequence[Mapping[str, float]]

    def difference_from(self, other: GreedyAnswer) -> str | None:
        """How this differs from ``other`` by more than ties; None if it does not. What comes after a tie that was
        decided otherwise is not compared."""
        for index, (token, theirs) in enumerate(zip(self.tokens, other.tokens, strict=True)):
            if token != theirs:
                return self._not_a_tie(index, other)
            change = abs(self.logprobs[index] - other.logprobs[index])
            if change > _TOLERANCE:
                return f"token {index} has a log-probability that is {change:.3f} off"
        return None

    def _not_a_tie(self, index: int, other: GreedyAnswer) -> str | None:
        """The answers agree up to token ``index``: whether there both answers count both tokens about as likely."""
        for answer, missing in ((self, other.tokens[index]), (other, self.tokens[index])):
            logprob = answer.top_logprobs[index].get(missing)
            if logprob is None or answer.logprobs[index] - logprob > _TOLERANCE:
                return f"token {index} is {self.tokens[index]!r} instead of {other.tokens[index]!r}, and it is no tie"
        return None
