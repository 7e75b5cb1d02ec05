"""Notices a worker that hangs: one that is there, and says nothing."""

from __future__ import annotations

import asyncio
import logging

logger = logging.getLogger(__name__)

_TICK_S = 0.5
_LEAST_TICKS = 8  # within the limit


class WorkerWatch:
    """Says in the log, once, that nothing has been heard of a worker that is ready for ``limit_s`` (0: never does), and
    once that it is heard again. The worker is let be: whatever it does may end.

    Time counts in ticks of this process. While it does not run itself, stopped or with the whole machine, what a worker
    says waits for it, and it would take its own silence for the worker's: such a pause is one tick, however long.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._pid: int | None = None  # of the worker that is watched
        self._task: asyncio.Task[None] | None = None
        self.silent_s = 0.0
        self.is_silent = False

    def start(self) -> None:
        """Begin to count time."""
        if self._limit_s > 0:
            self._task = asyncio.create_task(self._tick(), name="worker-watch")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def begin(self, pid: int | None) -> None:
        """This worker is ready."""
        self._pid, self.silent_s, self.is_silent = pid, 0.0, False

    def end(self) -> None:
        """The worker is gone."""
        self.begin(None)

    def heard(self) -> None:
        """Of the worker, whatever it was."""
        if self.is_silent:
            logger.warning("the worker, process %s, is heard again after %.0f s", self._pid, self.silent_s)
            self.is_silent = False
        self.silent_s = 0.0

    async def _tick(self) -> None:
        tick_s = min(_TICK_S, self._limit_s / _LEAST_TICKS)
        while True:
            await asyncio.sleep(tick_s)
            if self._pid is None:
                continue
            self.silent_s += tick_s
            if self.silent_s >= self._limit_s and not self.is_silent:
                self.is_silent = True
                logger.error(
                    "the worker, process %d, has said nothing for %g s (--worker-timeout): it does something very "
                    "long, or hangs. Requests wait, and /health answers 503, until it goes on. If it hangs, have "
                    "another one take its place: kill -KILL %d",
                    self._pid,
                    self._limit_s,
                    self._pid,
                )
