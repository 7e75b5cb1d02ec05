"""How large a micro-batch may be while part of training's memory is wanted elsewhere.

Limits come from a short ladder, so that a little memory more or less does not cut every step anew; on a GPU its rungs
are numbers of tokens that suit it (``waves``). (SIRIUS, section 4.1, gives training's memory back as well, by other
means.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

# Halvings of the largest micro-batch that are rungs.
_MOST_HALVINGS = 5
# A rung is this share of its halving at least, and a multiple of so many tokens, where the device's waves matter.
_LEAST_SHARE = 0.75
_TOKEN_BLOCK = 128
# A smaller micro-batch has costs of its own, and how much better it fits is an estimate.
_LEAST_GAIN = 1.05


def ladder(
    most: int, longest: int, efficiency: Callable[[int], float] | None = None, *, most_is_fixed: bool = True
) -> tuple[int, ...]:
    """Tokens of micro-batches, ascending: ``longest``, the example that no micro-batch can be smaller than, then
    halvings of ``most``, and ``most``.

    ``efficiency``: of a number of tokens on the device, by which a rung may be up to a quarter smaller than its
    halving; None: all numbers are alike. ``most_is_fixed``: the largest rung is ``most`` all the same.
    """
    halves = [most >> step for step in range(_MOST_HALVINGS + 1)]
    rungs = {longest}
    for size in halves:
        if size > longest:
            is_fixed = size == most and most_is_fixed
            rungs.add(size if efficiency is None or is_fixed else _rung(size, longest, efficiency))
    return tuple(sorted(rungs))


def _rung(halving: int, longest: int, efficiency: Callable[[int], float]) -> int:
    """The largest fitting number up to ``halving`` and above ``longest``, or one that is better by enough."""
    least = max(math.ceil(_LEAST_SHARE * halving), longest + 1)
    fitting = range(halving // _TOKEN_BLOCK * _TOKEN_BLOCK, least - 1, -_TOKEN_BLOCK)
    if not fitting:
        return halving
    best = max(fitting, key=efficiency)
    return best if efficiency(best) >= _LEAST_GAIN * efficiency(fitting[0]) else fitting[0]


class ActivationBudget:
    """Training's memory for activations: what the largest micro-batch takes, or ``available_bytes`` if that is less,
    without what was given away.

    ``needed_bytes``: of micro-batches, by their tokens; ``recomputing_bytes``: the same where layers keep their inputs
    alone, which costs arithmetic and is chosen only when no micro-batch fits otherwise. ``kept_back_bytes`` are never
    given away. Memory is given and taken in multiples of ``granularity_bytes``.
    """

    def __init__(
        self,
        needed_bytes: Mapping[int, int],
        *,
        recomputing_bytes: Mapping[int, int] | None = None,
        kept_back_bytes: int = 0,
        available_bytes: int | None = None,
        granularity_bytes: int = 1,
    ) -> None:
        self._needed = dict(needed_bytes)
        self._recomputing = dict(recomputing_bytes or {})
        self._granularity = granularity_bytes
        self._total = -(-max(self._needed.values()) // granularity_bytes) * granularity_bytes
        if available_bytes is not None:
            self._total = min(self._total, available_bytes // granularity_bytes * granularity_bytes)
        self._kept_back = min(self._total, kept_back_bytes)
        self._lend(0)

    @property
    def left_bytes(self) -> int:
        """What micro-batches may take."""
        return self._total - self.lent_bytes

    def _lend(self, num_bytes: int) -> None:
        """Have so many given away in all. ``max_tokens``: of a micro-batch; 0 when not even the smallest has room.
        ``recomputes``: whether there is room for micro-batches only if layers keep their inputs alone. Both are asked
        for each tasklet."""
        self.lent_bytes = num_bytes
        most, most_recomputing = self._largest(self._needed), self._largest(self._recomputing)
        self.recomputes = most == 0 and most_recomputing > 0
        self.max_tokens = most or most_recomputing

    def _largest(self, needed_bytes: Mapping[int, int]) -> int:
        return max((size for size, needed in needed_bytes.items() if needed <= self.left_bytes), default=0)

    def require(self, num_bytes: int) -> int:
        """Give away as much of ``num_bytes``, rounded up, as there is; how much that was."""
        wanted = -(-num_bytes // self._granularity) * self._granularity
        given = max(0, min(wanted, self.left_bytes - self._kept_back))
        self._lend(self.lent_bytes + given)
        return given

    def release(self, num_bytes: int) -> None:
        """Take back what was given away. Raises ValueError for more than that, and for a part that is no multiple of
        the granularity."""
        if num_bytes > self.lent_bytes:
            raise ValueError(f"{num_bytes} bytes given back, but only {self.lent_bytes} were given away")
        if num_bytes % self._granularity and num_bytes != self.lent_bytes:
            raise ValueError(f"{num_bytes} bytes given back: memory comes in multiples of {self._granularity}")
        self._lend(self.lent_bytes - num_bytes)
