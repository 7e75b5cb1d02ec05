"""A lean HTTP/1.1 client for streamed answers: one protocol object per connection, parsed by llhttp, kept alive.

General clients spend tens of microseconds on every event; at thousands of streams the load generator would then measure
itself.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

from cotenant.bench.event_stream import EventStream

_ERROR_BODY_BYTES = 2000


class ExchangeFailed(Exception):  # noqa: N818 - it says what happened, not that a program is wrong
    """A request that was not answered in full. ``kind`` is short and the same for all failures of its sort."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(f"{kind}: {message}" if message else kind)
        self.kind = kind
        self.message = message


class _NeverAnsweredError(Exception):
    """A kept connection was closed by the server before a byte of the answer: the request may be sent again."""


@dataclass(slots=True)
class _Exchange:
    """One request on a connection: where its answer goes, and the future that ends with it."""

    stream: EventStream
    ended: asyncio.Future[None]
    status: int = 0
    error_body: bytearray = field(default_factory=bytearray)


class _Connection(asyncio.Protocol):
    """One connection, at most one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._exchange: _Exchange | None = None
        self._now_s = 0.0
        self.is_usable = False

    def send(self, message: bytes, stream: EventStream) -> asyncio.Future[None]:
        """Send a request. The future ends when the answer has arrived whole, or with the reason why it has not."""
        assert self._transport is not None
        assert self._exchange is None
        self._parser = httptools.HttpResponseParser(self)
        self._exchange = _Exchange(stream, asyncio.get_running_loop().create_future())
        self._transport.write(message)
        return self._exchange.ended

    def close(self) -> None:
        """Close at once, whatever is under way."""
        self.is_usable = False
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not asyncio.Transport, but have all of it.
        self._transport = cast(asyncio.Transport, transport)
        self.is_usable = True

    def data_received(self, data: bytes) -> None:
        if self._exchange is None or self._parser is None:
            self.close()  # an answer that nobody asked for
            return
        self._now_s = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ExchangeFailed("malformed answer", str(error.__context__ or error)))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_usable = False
        exchange = self._exchange
        if exchange is None:
            return
        if exchange.status:
            # An answer without a length ends with its connection; whether it is whole shows in the events.
            self._end(self._judge(exchange))
        else:
            self._end(_NeverAnsweredError())

    # httptools

    def on_headers_complete(self) -> None:
        assert self._exchange is not None
        assert self._parser is not None
        self._exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        if exchange.status == 200:
            exchange.stream.feed(body, self._now_s)
        elif len(exchange.error_body) < _ERROR_BODY_BYTES:
            exchange.error_body += body

    def on_message_complete(self) -> None:
        assert self._parser is not None
        exchange = self._exchange
        if exchange is None:
            return
        if not self._parser.should_keep_alive():
            self.is_usable = False
        self._end(self._judge(exchange))

    def _judge(self, exchange: _Exchange) -> Exception | None:
        """The reason why an answer that has ended is none, or None."""
        if exchange.status != 200:
            return ExchangeFailed(f"HTTP {exchange.status}", _message_of(bytes(exchange.error_body)))
        stream = exchange.stream
        try:
            stream.finish()
        except msgspec.DecodeError as error:
            return ExchangeFailed("malformed answer", str(error))
        if stream.error is not None:
            return ExchangeFailed("error event", stream.error)
        if not stream.is_done:
            return ExchangeFailed("truncated stream", f"it ended after {len(stream.times)} chunks without [DONE]")
        if not stream.times:
            return ExchangeFailed("no tokens", "the stream ended without a chunk that carries a choice")
        return None

    def _fail(self, error: Exception) -> None:
        self._end(error)
        self.close()

    def _end(self, error: Exception | None) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is None or exchange.ended.done():
            return
        if error is None:
            exchange.ended.set_result(None)
        else:
            exchange.ended.set_exception(error)


class StreamClient:
    """Posts JSON bodies to one URL and feeds the streamed answers to ``EventStream``. Unlimited connections, reused."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float) -> None:
        parts = urlsplit(url)
        host = parts.hostname or ""
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._address = (host, parts.port or (443 if self._ssl else 80))
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []
        lines = [
            f"POST {parts.path or '/'}{'?' + parts.query if parts.query else ''} HTTP/1.1",
            f"Host: {parts.netloc.rpartition('@')[2]}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            *(f"{name}: {value}" for name, value in headers.items()),
            "Content-Length: ",
        ]
        self._head = "\r\n".join(lines).encode("latin-1")

    async def post(self, body: bytes, stream: EventStream) -> None:
        """Send a body and wait until its answer is in ``stream``. Raises ExchangeFailed, and nothing else."""
        message = b"%b%d\r\n\r\n%b" % (self._head, len(body), body)
        try:
            async with asyncio.timeout(self._timeout_s):
                while (connection := self._take()) is not None:
                    try:
                        return await self._exchange(connection, message, stream)
                    except _NeverAnsweredError:
                        continue
                await self._exchange(await self._connect(), message, stream)
        except TimeoutError:
            raise ExchangeFailed("timeout", f"no whole answer within {self._timeout_s:g} s") from None
        except _NeverAnsweredError:
            raise ExchangeFailed("connection lost", "the server closed it without an answer") from None

    def close(self) -> None:
        """Close the idle connections."""
        while (connection := self._take()) is not None:
            connection.close()

    async def _exchange(self, connection: _Connection, message: bytes, stream: EventStream) -> None:
        try:
            await connection.send(message, stream)
        except asyncio.CancelledError:
            connection.is_usable = False  # the rest of the answer would be taken for the next one's
            raise
        finally:
            # A refusal is an answer too, and leaves the connection to the next request.
            if connection.is_usable:
                self._idle.append(connection)
            else:
                connection.close()

    def _take(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
        return None

    async def _connect(self) -> _Connection:
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                _Connection, *self._address, ssl=self._ssl
            )
        except OSError as error:
            raise ExchangeFailed("cannot connect", str(error)) from None
        return connection


class _ErrorBody(msgspec.Struct):
    error: dict[str, object] | str | None = None
    message: str | None = None


def _message_of(body: bytes) -> str:
    """The server's own words about an error: OpenAI's shape, the flat one, or the text itself."""
    try:
        parsed = msgspec.json.decode(body, type=_ErrorBody)
    except msgspec.DecodeError:
        return body.decode(errors="replace")[:200]
    if isinstance(parsed.error, dict):
        return str(parsed.error.get("message"))
    return parsed.error or parsed.message or body.decode(errors="replace")[:200]
