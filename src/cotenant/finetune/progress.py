"""How long a job still takes, from how long its last steps and evaluations took."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

WINDOW = 64
# The first steps after a start make torch and the caches warm: of so many steps in a window one is left out, ...
_LEFT_OUT_OF = 4
# ... and while fewer than this are left, the slowest and the fastest quarter of them, but at least one each.
_MANY = 16


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens that go through the decoder: in training steps, and in evaluations."""

    trained_tokens: float
    evaluated_tokens: float


class Progress:
    """Measures wall time per token: suspensions, discarded work, checkpoints and the online tenant's share are in it.

    ``clock``: seconds on a monotonic clock. Time counts from the construction on.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_s = clock()
        self._forward_s = 0.0
        self._other_s = 0.0
        self._steps = _Rate()
        self._forwards = _Rate()
        self._evaluations = _Rate()

    def tasklet_done(self, *, forward: bool) -> None:
        """A tasklet of a training step is over. ``forward``: one that an evaluation of the same tokens would have."""
        if forward:
            self._forward_s += self._lap_s()
        else:
            self._other_s += self._lap_s()

    def trained(self, num_tokens: int, num_forward_tokens: int) -> None:
        """A step has been taken. ``num_forward_tokens``: more than ``num_tokens`` where some went forward twice."""
        self._steps.add(self._forward_s + self._other_s + self._lap_s(), num_tokens)
        self._forwards.add(self._forward_s, num_forward_tokens)
        self._forward_s = self._other_s = 0.0

    def evaluated(self, num_tokens: int) -> None:
        """The evaluation that follows a step is over."""
        self._evaluations.add(self._lap_s(), num_tokens)

    def remaining_s(self, left: Work) -> float | None:
        """An estimate for the work left; None before the first step."""
        if not self._steps:
            return None
        # Until an evaluation has been measured, it is believed to cost what the forward part of training does.
        evaluation = self._evaluations if self._evaluations else self._forwards
        return left.trained_tokens * self._steps.per_token_s + left.evaluated_tokens * evaluation.per_token_s

    def _lap_s(self) -> float:
        before_s, self._last_s = self._last_s, self._clock()
        return self._last_s - before_s


class _Rate:
    """Seconds per token over the last ``WINDOW`` times that something was done. False before the first."""

    def __init__(self) -> None:
        self._laps: deque[tuple[float, int]] = deque(maxlen=WINDOW)  # (seconds, tokens)

    def __bool__(self) -> bool:
        return bool(self._laps)

    def add(self, seconds: float, num_tokens: int) -> None:
        self._laps.append((seconds, num_tokens))

    @property
    def per_token_s(self) -> float:
        laps = list(self._laps)[len(self._laps) // _LEFT_OUT_OF :]
        if 2 < len(laps) < _MANY:
            laps.sort(key=lambda lap: lap[0] / max(1, lap[1]))
            num_extreme = max(1, len(laps) // 4)
            laps = laps[num_extreme:-num_extreme]
        return sum(seconds for seconds, _ in laps) / max(1, sum(tokens for _, tokens in laps))
