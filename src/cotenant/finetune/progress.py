"""How long a job still takes, from how long its last steps took."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

WINDOW_STEPS = 32


class Progress:
    """Measures the wall time of the last ``WINDOW_STEPS`` steps, suspensions and checkpoints included.

    ``clock``: seconds on a monotonic clock. Time counts from the construction on.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._finished_s = deque([clock()], maxlen=WINDOW_STEPS + 1)

    def step_finished(self) -> None:
        self._finished_s.append(self._clock())

    def remaining_s(self, num_steps_left: int) -> float | None:
        """An estimate for ``num_steps_left`` more steps; None before the first step."""
        num_measured = len(self._finished_s) - 1
        if num_measured == 0:
            return None
        return (self._finished_s[-1] - self._finished_s[0]) / num_measured * num_steps_left
