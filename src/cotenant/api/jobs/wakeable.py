"""Background work that is done whenever there may be some."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from cotenant.store import StoreError

logger = logging.getLogger(__name__)

RETRY_S = 2.0


class WakeableTask:
    """Calls ``work`` each time it is woken, again and again until it returns False: nothing is left to do for now.

    An error is logged, and the work tried again after ``RETRY_S``.
    """

    def __init__(self, name: str, work: Callable[[], Awaitable[bool]]) -> None:
        self._name = name
        self._work = work
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, awake. Call once, on the event loop."""
        self._woken.set()
        self._task = asyncio.create_task(self._run(), name=self._name)

    def wake(self) -> None:
        self._woken.set()

    async def stop(self) -> None:
        """Cancel the work that is being done, and wait until it has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            try:
                while await self._work():
                    pass
                continue
            except StoreError as error:
                logger.error("%s: %s Trying again in %g s.", self._name, error.message, RETRY_S)
            except Exception:
                logger.exception("%s: unexpected error; trying again in %g s", self._name, RETRY_S)
            await asyncio.sleep(RETRY_S)
            self._woken.set()
