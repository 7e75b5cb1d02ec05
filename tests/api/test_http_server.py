"""Connections that the API process lets go of, and that it does not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from cotenant.api import http_connection, http_server
from cotenant.api.http_server import HttpServer
from cotenant.api.server import open_listener
from cotenant.config import ApiConfig

HEAD = b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\n"

gone = asyncio.Event()
LARGE = 30_000_000  # of which hardly a part is in the kernel's buffers


async def answered(port: int) -> bool:
    """Whether somebody else is served."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + b"body")
    async with asyncio.timeout(30):
        is_answered = (await reader.readuntil(b"body")).startswith(b"HTTP/1.1 200")
    writer.close()
    return is_answered


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body, more = b"", True
    if scope["path"] == "/late":
        await asyncio.sleep(5)
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    if scope["path"] == "/waits":
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()
        return
    if scope["path"] == "/large":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(LARGE // 100_000):
            await send({"type": "http.response.body", "body": bytes(100_000), "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    await send({"type": "http.response.body", "body": body[:4]})


@asynccontextmanager
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """The port of a server that looks at its connections all the time."""
    monkeypatch.setattr(http_server, "LOOK_EVERY_S", 0.0)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(http_server.BACKLOG)
        server = HttpServer(echo)
        serving = asyncio.create_task(server.serve([listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield listener.getsockname()[1]
        server.should_exit = True
        await serving


def test_who_asks_for_nothing_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not who has sent the head of a request, nor who has been answered."""

    async def run() -> None:
        async with served(monkeypatch) as port:
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            silent[1][1].write(HEAD[:-2])  # half a head is none
            others = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            for _, writer in others:
                writer.write(HEAD)
            others[0][1].write(b"body")
            assert (await others[0][0].readuntil(b"body")).startswith(b"HTTP/1.1 200")
            for begun in (b"\r\n", HEAD[:9]):  # of the next one
                silent.append(await asyncio.open_connection("127.0.0.1", port))
                silent[-1][1].write(HEAD + b"body")
                await silent[-1][0].readuntil(b"body")
                silent[-1][1].write(begun)
            async with asyncio.timeout(30):
                for reader, _ in silent:
                    assert await reader.read() == b"", "closed"
            for _, writer in others:
                writer.write(b"late")
            others[0][1].write(HEAD + b"more")
            async with asyncio.timeout(30):
                assert (await others[1][0].readuntil(b"late")).startswith(b"HTTP/1.1 200")
            for _, writer in (*silent, *others):
                writer.close()

    uvloop.run(run())


def test_who_stops_in_the_middle_of_a_body_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not who goes on slowly, nor one whose body is not read, nor who has sent it all and waits for the answer."""
    monkeypatch.setattr(http_server, "BODY_SILENCE_S", 2.5)
    large = b"POST /late HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"

    async def run() -> None:
        async with served(monkeypatch) as port:
            stopped, slow, unread, waiting = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
            stopped[1].write(HEAD + b"bo")
            slow[1].write(HEAD)
            unread[1].write(large + bytes(500_000))
            waiting[1].write(HEAD.replace(b"/x", b"/late") + b"body")
            for number in range(4):
                await asyncio.sleep(1.5)
                slow[1].write(b"slow"[number : number + 1])
                if number == 2:
                    unread[1].write(bytes(500_000))
            async with asyncio.timeout(30):
                assert await stopped[0].read() == b"", "closed"
                assert (await slow[0].readuntil(b"slow")).startswith(b"HTTP/1.1 200")
                assert (await unread[0].readline()).startswith(b"HTTP/1.1 200")
                assert (await waiting[0].readuntil(b"body")).startswith(b"HTTP/1.1 200")
            for _, writer in (stopped, slow, unread, waiting):
                writer.close()

    uvloop.run(run())


@pytest.mark.parametrize(
    "piece",
    [b"a:b\r\n" * 1000, b"x-long: " + b"y" * 4000 + b"\r\n", b"y" * 5000],
    ids=["small lines", "large lines", "one line"],
)
@pytest.mark.parametrize("begun", [b"GET /x HTTP/1.1\r\nx: ", b"GET /"], ids=["a header", "the path"])
def test_a_head_has_an_end(monkeypatch: pytest.MonkeyPatch, begun: bytes, piece: bytes) -> None:
    """Nobody's key was asked for yet."""

    async def run() -> None:
        async with served(monkeypatch) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(begun)
            with contextlib.suppress(ConnectionError):
                for _ in range(100):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
            async with asyncio.timeout(30):
                with contextlib.suppress(ConnectionError):
                    answer = await reader.read()
                    if answer:  # reset, it may have been lost
                        is_http = begun.endswith(b" ") or b"\r\n" not in piece
                        assert answer.startswith(b"HTTP/1.1 431 " if is_http else b"HTTP/1.1 4")
            writer.close()
            assert await answered(port)

    uvloop.run(run())


def test_a_head_of_64_kib_is_answered_and_of_more_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with served(monkeypatch) as port:
            for num_lines, status in ((60, b"200"), (64, b"431")):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(HEAD[:-2] + b"".join(b"x-%04d: %s\r\n" % (n, b"y" * 1000) for n in range(num_lines)))
                writer.write(b"\r\nbody")
                async with asyncio.timeout(30):
                    assert (await reader.readline()).startswith(b"HTTP/1.1 " + status)
                    if status == b"431":
                        assert b'"code":"headers_too_large"' in await reader.read()
                writer.close()

    uvloop.run(run())


def test_trailers_are_dropped_and_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with served(monkeypatch) as port:
            chunked = HEAD.replace(b"Content-Length: 4", b"Transfer-Encoding: chunked") + b"4\r\nbody\r\n0\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(chunked + b"x-trailer: y\r\n\r\n")
            async with asyncio.timeout(30):
                assert (await reader.readuntil(b"body")).startswith(b"HTTP/1.1 200")
            for piece in (b"x-trailer: " + b"y" * 1000 + b"\r\n", b"y" * 1000):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(chunked + b"x: ")
                async with asyncio.timeout(30):
                    with contextlib.suppress(ConnectionError):
                        while not reader.at_eof():
                            writer.write(piece)
                            await writer.drain()
                            await asyncio.sleep(0.001)
                writer.close()

    uvloop.run(run())


def test_many_small_pieces_of_a_body_are_no_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more around them than a head may have."""

    async def run() -> None:
        async with served(monkeypatch) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD.replace(b"Content-Length: 4", b"Transfer-Encoding: chunked"))
            for _ in range(400):
                writer.write(b"1\r\nx\r\n" * 100)
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            async with asyncio.timeout(30):
                assert (await reader.readuntil(b"xxxx")).startswith(b"HTTP/1.1 200")
            writer.close()

    uvloop.run(run())


def test_who_does_not_read_the_answer_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not who reads slowly."""
    monkeypatch.setattr(http_connection, "ANSWER_SILENCE_S", 2.0)

    async def run() -> None:
        async with served(monkeypatch) as port:
            loop = asyncio.get_running_loop()
            with socket.socket() as unread, socket.socket() as slow:
                for client in (unread, slow):
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                    client.setblocking(False)
                    await loop.sock_connect(client, ("127.0.0.1", port))
                    await loop.sock_sendall(client, HEAD.replace(b"/x", b"/large") + b"body")
                num_read = 0
                for _ in range(40):
                    await asyncio.sleep(0.1)
                    num_read += len(await loop.sock_recv(slow, 100_000))
                assert 0 < num_read < LARGE / 2
                async with asyncio.timeout(60):
                    while num_read < LARGE:
                        part = await loop.sock_recv(slow, 1_000_000)
                        assert part
                        num_read += len(part)
                    num_unread = 0
                    with contextlib.suppress(ConnectionError):
                        while part := await loop.sock_recv(unread, 1_000_000):
                            num_unread += len(part)
                assert num_unread < LARGE

    uvloop.run(run())


UPGRADE = HEAD.replace(b"Content-Length: 4\r\n\r\n", b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n")


@pytest.mark.parametrize(
    "parts",
    [
        (UPGRADE + b"Content-Length: 4\r\n\r\nbody",),
        (UPGRADE + b"Content-Length: 4\r\n\r\n", b"bo", b"dy"),
        (UPGRADE + b"Content-Length: 4\r\nExpect: 100-continue\r\n\r\n", b"body"),
        (UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n",),
        (UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n", b"2\r\nbo\r\n2\r\ndy\r\n", b"0\r\n\r\n"),
    ],
)
def test_whoever_would_rather_speak_http_2_is_answered(
    monkeypatch: pytest.MonkeyPatch, parts: tuple[bytes, ...]
) -> None:
    """As curl --http2 asks. Its body is its own, and no other request."""

    async def run() -> None:
        async with served(monkeypatch) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.timeout(30):
                for part in parts:
                    writer.write(part)
                    await asyncio.sleep(0.05)
                assert b"HTTP/1.1 200" in await reader.readuntil(b"body")
                for head in (HEAD, UPGRADE + b"Content-Length: 4\r\n\r\n"):
                    writer.write(head + b"next" + head + b"last")  # what comes behind it is another one
                    assert (await reader.readuntil(b"next")).startswith(b"HTTP/1.1 200")
                    assert (await reader.readuntil(b"last")).startswith(b"HTTP/1.1 200")
            writer.close()

    uvloop.run(run())


def test_so_many_requests_may_be_sent_at_once_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    most = http_connection.MOST_PIPELINED

    async def run() -> None:
        async with served(monkeypatch) as port:
            for number, is_answered in ((most + 1, True), (10_000, False)):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                with contextlib.suppress(ConnectionError):
                    writer.write((HEAD + b"body") * number)
                    await writer.drain()
                async with asyncio.timeout(30):
                    if is_answered:
                        for _ in range(number):
                            assert (await reader.readuntil(b"body")).startswith(b"HTTP/1.1 200")
                    else:
                        with contextlib.suppress(ConnectionError):
                            assert (await reader.read()).count(b"HTTP/1.1 200") <= most + 1
                writer.close()
            assert await answered(port)

    uvloop.run(run())


def test_who_leaves_with_another_request_behind_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with served(monkeypatch) as port:
            gone.clear()
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD.replace(b"/x", b"/waits") + b"body" + HEAD + b"body")
            await asyncio.sleep(0.2)
            writer.close()
            async with asyncio.timeout(30):
                await gone.wait()

    uvloop.run(run())


def test_connections_notice_when_their_client_is_gone() -> None:
    with open_listener(ApiConfig(port=0)) as listener, socket.create_connection(listener.getsockname()):
        listener.setblocking(True)
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


def test_it_says_when_hardly_any_more_connections_can_be_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def limits(_: int) -> tuple[int, int]:
        return num_open, num_open

    async def run() -> None:
        async with served(monkeypatch) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD)  # it is not let go of
            async with asyncio.timeout(30):
                while not caplog.records:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(1.2)  # some more looks
            writer.write(b"body")
            await reader.readuntil(b"body")
            writer.close()

    num_open = 2
    monkeypatch.setattr(resource, "getrlimit", limits)
    with caplog.at_level(logging.WARNING, logger=http_server.__name__):
        uvloop.run(run())
    (said,) = [record.getMessage() for record in caplog.records if record.name == http_server.__name__]
    assert said.endswith(
        "of the 2 files that may be open (ulimit -n) are, 1 of them connections: soon nobody else gets one"
    )
