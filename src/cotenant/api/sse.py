"""Server-sent events, and noticing that a client is gone.

A response here belongs to one task; when the client goes away that task is cancelled, which closes the iterators below
it, and closing them frees their sequences in the worker.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cotenant.api.errors import error_object_of, request_id_of
from cotenant.api.middleware import BODY_SEND
from cotenant.core.errors import CotenantError, WorkerLostError

logger = logging.getLogger(__name__)

T = TypeVar("T")

EVENT_START, EVENT_END = b"data: ", b"\n\n"
DONE = EVENT_START + b"[DONE]" + EVENT_END
# What is held back of a stream to leave in one write is no more than that.
_MOST_HELD_BYTES = 1 << 16
_ENCODER = msgspec.json.Encoder()


def event(message: Any) -> bytes:
    """One event with ``message`` as its JSON data."""
    return EVENT_START + _ENCODER.encode(message) + EVENT_END


class TextEvents:
    """Events that differ in one text: all around it is encoded once. ``make`` gives the message for a text."""

    __slots__ = ("_after", "_before")

    def __init__(self, make: Callable[[str], Any]) -> None:
        mark = uuid.uuid4().hex  # occurs nowhere else in the message
        self._before, self._after = event(make(mark)).split(_ENCODER.encode(mark))

    def __call__(self, text: str) -> bytes:
        return b"".join((self._before, _ENCODER.encode(text), self._after))


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``; if the client goes away first, cancel it, wait until it has cleaned up, and raise
    ``ClientDisconnect``. The request's body must have been read."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStreamResponse(Response):
    """Sends ``first`` and the other ``events`` (framed by ``event``) as they come, then ``[DONE]``.

    An error after the first event can no longer change the status: it is sent as an event with an ``error`` object, and
    the stream ends there. ``events`` is closed however the response ends. While ``is_followed`` says that the next of
    ``events`` is to be had without waiting, what came is held back and leaves with it in one write, if it is not much.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        request_id: str,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        is_followed: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._request_id = request_id
        self._first = first
        self._events = events
        self._is_followed = is_followed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(receive, self._send_all(send, scope.get(BODY_SEND, send)))
        except ClientDisconnect:
            logger.info("%s: the connection ended before all of the stream was sent", self._request_id)
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send, send_body: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        held = b""
        try:
            await send_body({"type": "http.response.body", "body": self._first, "more_body": True})
            async for data in self._events:
                held += data
                if held and (len(held) > _MOST_HELD_BYTES or not self._is_followed()):
                    data, held = held, b""
                    await send_body({"type": "http.response.body", "body": data, "more_body": True})
                    if len(data) > _MOST_HELD_BYTES:
                        await asyncio.sleep(0)  # more may be here, and be sent without waiting
            held += DONE
        except Exception as error:
            if isinstance(error, CotenantError):
                # Of a worker's death its client has said how many streams it ends.
                level = logging.DEBUG if isinstance(error, WorkerLostError) else logging.WARNING
                logger.log(level, "%s: the stream ended with an error: %s", self._request_id, error.message)
            else:
                logger.exception("%s: unexpected error during the stream", self._request_id)
            held += event(error_object_of(error))
        await send_body({"type": "http.response.body", "body": held, "more_body": False})


async def stream_response(
    request: Request, events: AsyncGenerator[bytes, None], is_followed: Callable[[], bool]
) -> Response:
    """A stream of ``events``, of which some may be empty. The first one is awaited before the status is sent: an error
    until then (over capacity, a request that the worker refuses) is raised here and becomes an ordinary error
    response. ``is_followed``: see ``EventStreamResponse``."""

    async def next_event() -> bytes:
        while not (data := await anext(events)):
            pass
        return data

    try:
        first = await run_until_disconnect(request.receive, next_event())
    except BaseException:
        await events.aclose()
        raise
    return EventStreamResponse(request_id_of(request), first, events, is_followed)
