"""A run by one process or several: each sends its share of the schedule, all count from the same moment.

A helper process reads its share from stdin (a length, then msgpack), says that it is ready, reads the start on the
clock that all processes of a machine share (``time.monotonic``), and writes what it saw to stdout. The end of its stdin
ends its run early.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from cotenant.bench.generator import Generator, Share, ShareResult, allow_many_connections
from cotenant.core.errors import CotenantError
from cotenant.processes import start_process

T = TypeVar("T")

_READY = b"r"
_LENGTH = struct.Struct("<Q")
_START = struct.Struct("<d")
# Long enough for every process to be waiting when the run starts.
_HEAD_START_S = 0.2


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` on uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


async def run_shares(shares: Sequence[Share]) -> tuple[list[ShareResult], bool]:
    """Run each share in a process of its own, a single one in this process.

    Returns the results, and whether the run was ended early with Ctrl-C: once to end it and have its figures, twice to
    drop them. Raises CotenantError when a helper process dies.
    """
    if len(shares) > 1:
        return await _run_in_processes(shares)
    allow_many_connections()
    generator = Generator(shares[0])
    generator.prepare()
    with _interrupt_sets(generator.stop) as interrupted:
        result = await generator.run(time.monotonic() + _HEAD_START_S)
        return [result], interrupted.is_set()


async def _run_in_processes(shares: Sequence[Share]) -> tuple[list[ShareResult], bool]:
    async with contextlib.AsyncExitStack() as stack:
        helpers = [await stack.enter_async_context(_helper()) for _ in shares]
        for helper, share in zip(helpers, shares, strict=True):
            content = msgspec.msgpack.encode(share)
            _stdin(helper).write(_LENGTH.pack(len(content)) + content)
        for helper in helpers:
            await _read(helper, len(_READY))
        start_s = time.monotonic() + _HEAD_START_S
        for helper in helpers:
            _stdin(helper).write(_START.pack(start_s))

        def stop() -> None:
            for helper in helpers:
                _stdin(helper).close()

        with _interrupt_sets(stop) as interrupted:
            results = await asyncio.gather(*(_read_result(helper) for helper in helpers))
            return list(results), interrupted.is_set()


@contextlib.asynccontextmanager
async def _helper() -> AsyncIterator[asyncio.subprocess.Process]:
    process = await start_process(
        sys.executable,
        "-m",
        "cotenant.bench.processes",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        _stdin(process).close()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()


def _stdin(process: asyncio.subprocess.Process) -> asyncio.StreamWriter:
    assert process.stdin is not None
    return process.stdin


async def _read(process: asyncio.subprocess.Process, size: int) -> bytes:
    assert process.stdout is not None
    try:
        return await process.stdout.readexactly(size)
    except asyncio.IncompleteReadError:
        raise CotenantError(f"a load generator process ended with code {await process.wait()}") from None


async def _read_result(process: asyncio.subprocess.Process) -> ShareResult:
    (size,) = _LENGTH.unpack(await _read(process, _LENGTH.size))
    return msgspec.msgpack.decode(await _read(process, size), type=ShareResult)


@contextlib.contextmanager
def _interrupt_sets(stop: Callable[[], None]) -> Iterator[asyncio.Event]:
    """Ctrl-C calls ``stop`` and sets the event; a second one raises KeyboardInterrupt as ever."""
    loop, interrupted = asyncio.get_running_loop(), asyncio.Event()

    def interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        interrupted.set()
        stop()

    try:
        loop.add_signal_handler(signal.SIGINT, interrupt)
    except (ValueError, RuntimeError):  # not the main thread: nobody can interrupt us here
        yield interrupted
        return
    try:
        yield interrupted
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def _serve_share() -> None:
    """A helper process."""
    stdin = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin.buffer)
    (size,) = _LENGTH.unpack(await stdin.readexactly(_LENGTH.size))
    generator = Generator(msgspec.msgpack.decode(await stdin.readexactly(size), type=Share))
    generator.prepare()
    _write(_READY)
    (start_s,) = _START.unpack(await stdin.readexactly(_START.size))
    ended = asyncio.create_task(stdin.read())
    ended.add_done_callback(lambda _: generator.stop())
    content = msgspec.msgpack.encode(await generator.run(start_s))
    ended.cancel()
    _write(_LENGTH.pack(len(content)) + content)


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    # Ctrl-C reaches the whole process group; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    allow_many_connections()
    with contextlib.suppress(asyncio.IncompleteReadError, BrokenPipeError):
        run_loop(_serve_share())
