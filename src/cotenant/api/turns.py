"""Long work on the event loop, a little at a time."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Turns:
    """Turns that work which would hold up other clients is done in. Between two of them, whosever they are, all that
    is ready has its own: however many such requests there are, nobody waits for more than one turn at a time.

    A thread is no way out. Work in Python keeps the interpreter for 5 ms at a time from the thread of the event loop,
    each time that this wants it back, and what encodes JSON does not let go of it at all.
    """

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()

    async def take(self, work: Callable[[], T]) -> T:
        """Do ``work``, which should take a millisecond or two."""
        async with self._one_at_a_time:
            await asyncio.sleep(0)
            with nothing_is_garbage():
                return work()


@contextmanager
def nothing_is_garbage() -> Iterator[None]:
    """While many objects are made, that stay or that are gone right after: the collector would walk all there are
    again and again, which takes longer than all else."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
