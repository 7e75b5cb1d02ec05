"""Structs as JSON responses, and JSON that is put together of parts, so that no part takes long to make or to send."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_ENCODER = msgspec.json.Encoder()
_SENT_BYTES = 1 << 18  # at a time


def json_response(body: msgspec.Struct) -> Response:
    """``body`` as the whole answer, status 200."""
    return Response(_ENCODER.encode(body), media_type="application/json")


class JsonParts(Response):
    """Parts that are one JSON text together as the whole answer, status 200."""

    media_type = "application/json"

    def __init__(self, parts: Sequence[bytes]) -> None:
        super().__init__()
        self.headers["content-length"] = str(sum(map(len, parts)))
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        held = b""
        for data in joined(self._parts):
            if held:
                await send({"type": "http.response.body", "body": held, "more_body": True})
                await asyncio.sleep(0)
            held = data
        await send({"type": "http.response.body", "body": held, "more_body": False})


def joined(parts: Sequence[bytes]) -> Iterator[bytes]:
    """The same in fewer and larger parts, of what is sent at a time."""
    held: list[bytes] = []
    num_bytes = 0
    for part in parts:
        held.append(part)
        num_bytes += len(part)
        if num_bytes >= _SENT_BYTES:
            yield b"".join(held)
            held, num_bytes = [], 0
    yield b"".join(held)


def around(make: Callable[[Any], Any]) -> tuple[bytes, bytes]:
    """What stands before and after a value in the JSON of what ``make`` puts it in."""
    mark = uuid.uuid4().hex  # occurs nowhere else
    before, after = _ENCODER.encode(make(mark)).split(_ENCODER.encode(mark))
    return before, after


def json_items(values: Sequence[Any]) -> bytes:
    """A list's JSON without its brackets."""
    return _ENCODER.encode(values)[1:-1]


def listed(items: Sequence[Sequence[bytes]]) -> list[bytes]:
    """Items, or stretches of them, each in parts, with commas between."""
    parts: list[bytes] = []
    for item in items:
        if parts:
            parts.append(b",")
        parts += item
    return parts
