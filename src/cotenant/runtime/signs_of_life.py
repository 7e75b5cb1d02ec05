"""By what the API process tells a worker that is busy from one that hangs."""

from __future__ import annotations

import time
from collections.abc import Callable

from cotenant.wire.messages import Stats

# Far below what `--worker-timeout` is: one may be late.
REPEAT_EVERY_S = 5.0


class SignsOfLife:
    """Sends statistics, and the last ones again where there are no new ones for long: in an iteration of very many
    tasklets, say. It is the loop that does, and no thread beside it, which would go on when the loop hangs."""

    def __init__(self, send: Callable[[Stats], None]) -> None:
        self._send = send
        self._last = Stats()
        self._repeat_at_s = time.monotonic() + REPEAT_EVERY_S

    def send(self, stats: Stats) -> None:
        self._send(stats)
        self._last = stats
        self._repeat_at_s = time.monotonic() + REPEAT_EVERY_S

    def repeat_if_due(self) -> None:
        """Costs a look at the clock."""
        if time.monotonic() >= self._repeat_at_s:
            self.send(self._last)
