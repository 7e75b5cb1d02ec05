"""What processes owe their parents, and how they begin."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask Linux to kill this process when its parent ends, and exit if it has ended already (in the seconds that the
    imports took, perhaps)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)


@contextmanager
def importing() -> Iterator[None]:
    """While a process imports what it needs. Next to nothing of that is garbage: the collector, which would walk all of
    it again and again as it grows, rests meanwhile, and never walks it after."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


async def start_process(*command: str, **options: Any) -> asyncio.subprocess.Process:
    """``asyncio.create_subprocess_exec(*command, **options)``; where this is cancelled, nothing of the process is left.

    Event loops kill a process that is cancelled while it starts, but uvloop does not wait until it has ended.
    """
    starting = asyncio.ensure_future(asyncio.create_subprocess_exec(*command, **options))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(_kill)  # also if this is cancelled again
        with suppress(OSError):  # it could not be started
            process = await asyncio.shield(starting)
            _kill(starting)
            await process.wait()
        raise


def _kill(started: asyncio.Future[asyncio.subprocess.Process]) -> None:
    if not started.cancelled() and started.exception() is None:
        with suppress(ProcessLookupError):
            started.result().kill()
