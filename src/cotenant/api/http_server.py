"""uvicorn as the API process runs it: what a connection may take, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import select
import socket
import time
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from cotenant.api.http_connection import Connection

logger = logging.getLogger(__name__)

# Connections that arrive together wait here until they are accepted; more than any burst that we promise to answer.
BACKLOG = 2048
KEEP_ALIVE_S = 75
# A connection that has sent no request's head from one look to the next is closed: it is an open file.
LOOK_EVERY_S = 30
# So is one that owes the rest of a request's body and sends nothing for so long: it holds what has come, too. Longer
# than from one look to the next.
BODY_SILENCE_S = 60.0
# What a connection that was accepted last may take to send the head of its request.
_FIRST_REQUEST_TIMEOUT_S = 1.0
_WANTED_OPEN_FILES = 65536
# A silent client is asked four times whether it is there, and is gone after two minutes. Where the system has these.
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
_MANY = 0.9  # of those that may be open


_Silent = tuple[Connection, RequestResponseCycle | None]


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers of its own: a signal drains the worker too. Who has connected when it ends is
    answered, and not reset. Who connects and asks for nothing is let go of after a while, and so is who asks for
    something and stops in the middle, or does not read the answer."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=None,  # whoever runs it ends what does not end by itself
                callback_notify=self._look_after_connections,
                timeout_notify=LOOK_EVERY_S,
            )
        )
        self._silent: set[_Silent] = set()  # when they were looked at the last time
        self._is_warned = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.server_state.default_headers = [*self.server_state.default_headers, (b"connection", b"close")]
        for listener in sockets or ():
            await _accept_backlog(listener)
            listener.close()
        for server in self.servers:
            server.close()
        deadline_s = time.monotonic() + _FIRST_REQUEST_TIMEOUT_S
        while True:
            await asyncio.sleep(0.01)  # the connection that was accepted last appears in the loop's next iteration
            if self.force_exit or time.monotonic() > deadline_s or not self._has_new_connections():
                break
        await super().shutdown(sockets)

    def _has_new_connections(self) -> bool:
        """Whether one has had no request yet: uvicorn would close it, whatever is on its way."""
        return bool(self._without_request())

    def _connections(self) -> list[Connection]:
        return [each for each in self.server_state.connections if isinstance(each, Connection)]

    def _without_request(self) -> set[Connection]:
        """The connections on which no request's head has come yet."""
        return {each for each in self._connections() if each.cycle is None}

    def _asked_for_nothing(self) -> set[_Silent]:
        """The connections whose client has something to say first, each with what it was answered last. Of those that
        were answered uvicorn closes the ones from which nothing comes; not any more once a part of a head has come."""
        found: set[_Silent] = {(each, None) for each in self._without_request()}
        for each in self._connections():
            if each.cycle is not None:
                is_answered = each.cycle.response_complete and not each.pipeline
                if is_answered and each.timeout_keep_alive_task is None:
                    found.add((each, each.cycle))
        return found

    def _stopped_in_a_body(self) -> list[Connection]:
        """The connections whose client has sent nothing of a body for too long, though it was read."""
        now_s = asyncio.get_running_loop().time()
        owing = [each for each in self._connections() if each.owes_body]
        for each in owing:
            if each.flow.read_paused:
                each.heard_s = now_s
        return [each for each in owing if now_s - each.heard_s > BODY_SILENCE_S]

    async def _look_after_connections(self) -> None:
        silent = self._asked_for_nothing()
        for connection, _ in silent & self._silent:  # for as long as from one look to the next
            connection.transport.close()
        for connection in self._stopped_in_a_body():
            connection.transport.close()
        now_s = asyncio.get_running_loop().time()
        for connection in self._connections():
            if not connection.is_read(now_s):
                connection.transport.abort()  # closing it would wait for its client
        self._silent = silent - self._silent
        num_connections = len(self.server_state.connections)
        shortage = _shortage_of_files(num_connections)
        if shortage is not None and not self._is_warned:
            logger.warning("%s, %d of them connections: soon nobody else gets one", shortage, num_connections)
        self._is_warned = shortage is not None

    def cut_connections(self) -> int:
        """End those that are open, as if their clients had left; returns how many."""
        connections = list(self.server_state.connections)
        for connection in connections:
            connection.transport.abort()
        return len(connections)


async def _accept_backlog(listener: socket.socket) -> None:
    """Let the event loop accept all connections that wait now. It takes one in each of its iterations."""
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    for _ in range(BACKLOG):
        if not waiting.poll(0):
            return
        await asyncio.sleep(0)


def notice_dead_clients(listener: socket.socket) -> None:
    """Have the kernel end connections whose client's machine is gone, of which it says nothing as long as nothing is
    sent: while a body is to come, or an answer is made."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        option = getattr(socket, name, None)
        if option is not None:
            listener.setsockopt(socket.IPPROTO_TCP, option, value)


def raise_open_files_limit() -> None:
    """A connection is an open file, and the usual soft limit of 1,024 is soon reached."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_OPEN_FILES if hard == resource.RLIM_INFINITY else min(_WANTED_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _shortage_of_files(num_connections: int) -> str | None:
    """How few more files may be open, in words; None if that is many."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or 2 * num_connections < most:
        return None
    try:
        num_open = len(os.listdir("/dev/fd"))
    except OSError:  # there is none left to look with
        num_open = most
    return f"{num_open} of the {most} files that may be open (ulimit -n) are" if num_open >= _MANY * most else None
