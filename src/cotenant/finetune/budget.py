"""How large a micro-batch may be while part of training's memory is wanted elsewhere.

Limits come from a short ladder, so that a little memory more or less does not cut every step anew; on a GPU its rungs
are numbers of tokens that suit it (``waves``). (SIRIUS, section 4.1, gives training's memory back as well, by other
means.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

# Halvings of the largest micro-batch that are rungs.
_MOST_HALVINGS = 5
# A rung is this share of its halving at least, and a multiple of so many tokens, where the device's waves matter.
_LEAST_SHARE = 0.75
_TOKEN_BLOCK = 128
# A smaller micro-batch has costs of its own, and how much better it fits is an estimate.
_LEAST_GAIN = 1.05
# Layers are recomputed in so many steps from none to all: few, since each makes frames of its own.
_RECOMPUTING_STEPS = 4


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


@dataclass(frozen=True, slots=True)
class Choice:
    """How micro-batches use memory: of ``max_tokens`` tokens at most, of whose layers the first ``num_recomputed`` keep
    their inputs alone, they need ``num_bytes``. ``time``: how long training should take so, in units of its own."""

    max_tokens: int
    num_recomputed: int
    num_bytes: int
    time: float


def choices(
    sizes: Sequence[int],
    num_layers: int,
    needed_bytes: Callable[[int, int], int],
    time_share: float,
    efficiency: Callable[[int], float] | None,
    *,
    recompute_all: bool,
) -> tuple[Choice, ...]:
    """All ways to train, the fastest first: each number of tokens of ``sizes``, ascending, with none of the layers to
    all but the last recomputed, or always so many with ``recompute_all``. (What the last layer keeps its backward needs
    at once, before any other layer's.)

    ``needed_bytes``: of a number of tokens and one of layers. ``time_share``: of the time of a micro-batch, what
    it takes on top to recompute all layers. ``efficiency``: of a number of tokens on the device; a larger one is never
    believed to be worse. None: all are alike, so that layers are recomputed only where nothing else fits.
    """
    steps = range(_RECOMPUTING_STEPS, _RECOMPUTING_STEPS + 1) if recompute_all else range(_RECOMPUTING_STEPS + 1)
    levels = sorted({-(-(num_layers - 1) * step // _RECOMPUTING_STEPS) for step in steps})
    rates = accumulate((1.0 if efficiency is None else efficiency(size) for size in sizes), max)
    every = (
        Choice(size, level, needed_bytes(size, level), (1.0 + time_share * level / num_layers) / rate)
        for size, rate in zip(sizes, rates, strict=True)
        for level in levels
    )
    return tuple(sorted(every, key=lambda choice: (choice.time, -choice.max_tokens)))


class ActivationBudget:
    """Training's memory for activations: what the largest micro-batch takes, or ``available_bytes`` if that is less,
    without what was given away.

    ``choices``: the best first, of which the first that has room holds. ``kept_back_bytes`` are never given away.
    Memory is given and taken in multiples of ``granularity_bytes``.
    """

    def __init__(
        self,
        choices: Iterable[Choice],
        *,
        kept_back_bytes: int = 0,
        available_bytes: int | None = None,
        granularity_bytes: int = 1,
    ) -> None:
        self._choices = tuple(choices)
        self._granularity = granularity_bytes
        most = max(kept_back_bytes, *(choice.num_bytes for choice in self._choices))
        self._total = -(-most // granularity_bytes) * granularity_bytes
        if available_bytes is not None:
            self._total = min(self._total, available_bytes // granularity_bytes * granularity_bytes)
        self._kept_back = min(self._total, -(-kept_back_bytes // granularity_bytes) * granularity_bytes)
        self._lend(0)

    @property
    def left_bytes(self) -> int:
        """What micro-batches may take."""
        return self._total - self.lent_bytes

    def _lend(self, num_bytes: int) -> None:
        """Have so many given away in all. ``max_tokens``: of a micro-batch; 0 when not even the smallest has room.
        ``num_recomputed``: of its layers. ``time``: as of ``Choice``. They are asked for each tasklet."""
        self.lent_bytes = num_bytes
        best = next((choice for choice in self._choices if choice.num_bytes <= self.left_bytes), None)
        self.max_tokens, self.num_recomputed = (0, 0) if best is None else (best.max_tokens, best.num_recomputed)
        self.time = math.inf if best is None else best.time

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
