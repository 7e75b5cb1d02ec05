"""A request that the worker's client has admitted, and the hand-over of its results to the one task that reads them."""

from __future__ import annotations

import asyncio
from collections import deque

from cotenant.core.errors import CotenantError
from cotenant.core.request import Request, SequenceOutput


class LiveRequest:
    """A request between ``generate`` and its last output.

    ``sent``: the worker that runs now has it. ``streamed``: some output was handed to the caller, so the request can
    not be run again, unless ``is_collected``: by the caller, under another id. ``has_ended``: its last result has come.
    ``results`` holds what has come and was not handed over, oldest first; it is the reader who takes from it, and waits
    in ``arrival`` while it is empty.
    """

    __slots__ = ("_reader", "has_ended", "is_collected", "num_runs", "request", "results", "sent", "streamed")

    def __init__(self, request: Request, is_collected: bool = False) -> None:
        self.request = request
        self.is_collected = is_collected
        self.results: deque[SequenceOutput | CotenantError] = deque()
        self.sent = False
        self.streamed = False
        self.has_ended = False
        self.num_runs = 0
        self._reader: asyncio.Future[None] | None = None

    def add(self, output: SequenceOutput) -> None:
        """The worker's next output; ignored after the last result."""
        if self.has_ended:
            return
        if output.finish_reason is not None:
            self.has_ended = True
        self.results.append(output)
        if self._reader is not None:
            self._wake()

    def fail(self, error: CotenantError) -> None:
        """End with an error; ignored after the last result."""
        if self.has_ended:
            return
        self.has_ended = True
        self.results.append(error)
        if self._reader is not None:
            self._wake()

    async def arrival(self) -> None:
        """Return once there are results. For one reader."""
        while not self.results:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None

    def _wake(self) -> None:
        """Wake the reader, once however many results come before it runs."""
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)
