"""What should hold when nobody is served, checked in production too: a lost page, or one with two owners, is noticed
before it makes an answer wrong."""

from __future__ import annotations

from collections.abc import Callable

from cotenant.engine.engine import OnlineEngine

# All pages are checked after so long without work. On a GPU there are so many that it takes tens of milliseconds, which
# are not spent between a conversation's turns, nor while a job waits for its files.
_QUIET_S = 1.0


class IdleCheck:
    """Of an engine, once after its last batch. What is live, seats, adapters and the number of pages are checked at
    once: that takes no time, for nobody is live. All pages are when it has been quiet, and whoever comes meanwhile
    waits for a part of that; then it begins anew in the next quiet."""

    def __init__(self, engine: OnlineEngine, pending: Callable[[], bool]) -> None:
        """``pending``: whether somebody waits."""
        self._engine = engine
        self._pending = pending
        self.begin_anew()

    def begin_anew(self) -> None:
        """A batch has run."""
        self._is_live_checked = self._are_pages_checked = False

    def run(self, quiet_s: float) -> None:
        """Nobody is live, and there has been no work for so long. Raises AssertionError as
        ``OnlineEngine.check_integrity`` does."""
        is_quiet = quiet_s >= _QUIET_S
        if self._is_live_checked and (self._are_pages_checked or not is_quiet):
            return
        checks = self._engine.integrity_checks()
        next(checks)
        self._is_live_checked = True
        if is_quiet and not self._are_pages_checked:
            self._are_pages_checked = all(not self._pending() for _ in checks)
