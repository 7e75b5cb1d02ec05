"""One HTTP connection as uvicorn serves it, and what it adds: a client may not have it keep more than so much."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import sys
import termios
from collections.abc import Iterator
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from cotenant.api.errors import error_response

# Of a request's head at most, each line counted with what it takes besides; and of what is neither head nor body.
MOST_HEAD_BYTES = 65536
# Requests that were sent while one is answered: each is some kilobytes, of twenty bytes that came.
MOST_PIPELINED = 64
# A client may read nothing of its answer for so long: until then all of it is kept. Longer than from one look at the
# connections to the next.
ANSWER_SILENCE_S = 120.0
_BYTES_OF_A_LINE = 32
_HEAD_TOO_LARGE = f"The request's head has more than {MOST_HEAD_BYTES} bytes."
_FRAMING = (b"content-length", b"transfer-encoding")  # the fields that say where a body ends


class _HeadTooLargeError(Exception):
    """Of a request; the parser ends there."""


class _TooManyRequestsError(Exception):
    """Pipelined ones; as above."""


class _Parser:
    """httptools' parser, which goes on where that would leave the connection to another protocol: there is none to
    change to, so a request for one is as any other (RFC 9110, 7.8), body and all."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._parser = _new_parser(connection)

    def feed_data(self, data: bytes) -> None:
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._parser = _new_parser(self._connection)
                head = self._connection.head_again()
                if head is not None:
                    with self._connection.muted():
                        self._parser.feed_data(head)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)


def _new_parser(connection: Connection) -> Any:
    parser = httptools.HttpRequestParser(connection)
    with contextlib.suppress(AttributeError):  # as uvicorn has its own
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


class Connection(HttpToolsProtocol):
    """``heard_s``: when something came from the client last, in the loop's time."""

    heard_s = 0.0
    _moved_s, _num_unsent = 0.0, 0  # when the client read some of its answer last, and what is left, while much is
    _in_head = False
    _head_bytes = 0  # of the head that comes
    _held_bytes = 0  # of what has come since there was something of a body, or a head's end: the parser keeps it
    _has_gone_on = False
    _is_muted = False
    _answered: RequestResponseCycle | None = None  # the request that is, or was last

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.parser = _Parser(self)  # type: ignore[assignment]

    # What comes.

    def data_received(self, data: bytes) -> None:
        self.heard_s, self._has_gone_on = self.loop.time(), False
        super().data_received(data)
        self._held_bytes = 0 if self._has_gone_on else self._held_bytes + len(data)
        if self._held_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self._refuse_head()

    def on_message_begin(self) -> None:
        if not self._is_muted:
            self._in_head = self._has_gone_on = True
            self._head_bytes = 0
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_muted:
            self._count(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # or it is a trailer, which nobody reads
            self._count(len(name) + len(value) + _BYTES_OF_A_LINE)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._is_muted:
            if len(self.pipeline) >= MOST_PIPELINED:
                raise _TooManyRequestsError
            self._in_head, self._has_gone_on = False, True
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._has_gone_on = True
        super().on_body(body)

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MOST_HEAD_BYTES:
            raise _HeadTooLargeError

    def head_again(self) -> bytes | None:
        """For the request that has come last, whose body the parser has not looked for: a head with what it has to know
        of that; None if there is none. What is told of the request as if it had ended is taken back."""
        framing = [b"%s: %s\r\n" % field for field in self.headers if field[0] in _FRAMING]
        if not framing or self.cycle is None:
            return None
        self.cycle.more_body = True
        self.cycle.message_event.clear()
        return b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n"

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """For what the parser is told again."""
        self._is_muted = True
        try:
            yield
        finally:
            self._is_muted = False

    # What is refused.

    def send_400_response(self, msg: str) -> None:
        """For what is no HTTP, a head that is too large, or too many requests at once."""
        if self._head_bytes > MOST_HEAD_BYTES:
            self._refuse_head()
        elif self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # in the middle of an answer there is nothing to say
        else:
            super().send_400_response(msg)

    def _refuse_head(self) -> None:
        """In the middle of an answer to what came before, or of a body, the connection ends without a word."""
        if self.cycle is None or self.cycle.response_complete:
            content = error_response(_HEAD_TOO_LARGE, 431, code="headers_too_large")
            self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
            for name, value in (*content.raw_headers, (b"connection", b"close")):
                self.transport.write(b"%s: %s\r\n" % (name, value))
            self.transport.write(b"\r\n" + bytes(content.body))
        self.transport.close()

    # Who is answered.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.pipeline and not self.transport.is_closing():
            self.flow.pause_reading()  # what has come is answered first

    def connection_lost(self, exc: Exception | None) -> None:
        """uvicorn tells it to the request that has come last, which need not be the one that is answered."""
        for cycle in (self._answered, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._moved_s = self.loop.time()
        super().pause_writing()

    def is_read(self, now_s: float) -> bool:
        """Whether the client has read some of its answer lately, if much of that waits to be sent. It goes by what was
        left when it was asked the last time."""
        num_unsent = _unsent_bytes(self.transport) if self.flow.write_paused else 0
        if not num_unsent or num_unsent != self._num_unsent:
            self._moved_s, self._num_unsent = now_s, num_unsent
        return now_s - self._moved_s <= ANSWER_SILENCE_S

    @property
    def owes_body(self) -> bool:
        """Whether the rest of a request is to come, and the client has been told to send it."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.waiting_for_100_continue:
            return False
        return bool(cycle.more_body)


def _unsent_bytes(transport: asyncio.Transport) -> int:
    """Of an answer, with those that the kernel has and the client has not taken: that is up to some megabytes, of which
    it asks for more when a good part is gone."""
    num_bytes = transport.get_write_buffer_size()
    with contextlib.suppress(OSError, ValueError):
        kernel = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        num_bytes += int.from_bytes(kernel, sys.byteorder)
    return num_bytes
