"""Training files are validated and tokenised in a process of their own: it may be slow, large, or killed."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from contextlib import suppress

import msgspec

from cotenant.api.jobs import prepare_main
from cotenant.api.jobs.prepare_main import Failure, Reply, Task
from cotenant.config import child_environment
from cotenant.core.errors import CotenantError, InvalidInputError
from cotenant.processes import start_process
from cotenant.store.errors import store_error
from cotenant.text.prepared_file import PreparedFile

logger = logging.getLogger(__name__)

# Where all processes of a server are killed, the server may be the last one: it is gone by then. And memory that
# another program had may be free again.
_AGAIN_AFTER_S = 0.5
# Waits between attempts to start a process: memory, processes or open files that others had may be free again, and an
# installation that is being replaced is there again.
START_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_FAILED = "validation_failed"


async def prepare(task: Task) -> tuple[PreparedFile, ...]:
    """Run ``task`` in a child process, which is killed if this is cancelled; one that does not end well is started once
    more, and one that cannot be started is tried again a few times.

    Raises InvalidInputError for what is wrong with a file, StoreError for what is with the disk, or CotenantError.
    """
    exit_code, output = await _run_until_done(task)
    # An interrupt that meets Python while it starts ends it with an exit code, and so may a want of memory.
    if exit_code != 0:
        logger.warning("the process that validates files %s; starting it once more", _ended(exit_code))
        await asyncio.sleep(_AGAIN_AFTER_S)
        exit_code, output = await _run_until_done(task)
    if exit_code != 0:
        raise CotenantError(
            f"The files could not be validated: the process that does it {_ended(exit_code)}, when it was started "
            "again, too. Perhaps there was not enough memory.",
            code=_FAILED,
        )
    reply = msgspec.json.decode(output, type=Reply)
    if reply.failure is not None:
        raise _error_of(reply.failure)
    return reply.files


def _ended(exit_code: int) -> str:
    return f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"


async def _run_until_done(task: Task) -> tuple[int, bytes]:
    """``_run``, as often as the child is told to end: that was sent to all processes of the server at once, before the
    child could say that it leaves it to its parent."""
    exit_code, output = await _run(task)
    while -exit_code in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        logger.info("the process that validates files was told to end while it started; starting it again")
        exit_code, output = await _run(task)
    return exit_code, output


async def _run(task: Task) -> tuple[int, bytes]:
    """The child's exit code, negative if a signal ended it, and what it has written."""
    process = await _start()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with suppress(ConnectionError):  # a child that died at once; its exit code says more
            if not process.stdin.is_closing():  # uvloop raises RuntimeError for a write to a pipe that it has closed
                process.stdin.write(msgspec.json.encode(task) + b"\n")
                await process.stdin.drain()
        output = await process.stdout.read()
        return await process.wait(), output
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        process.stdin.close()


async def _start() -> asyncio.subprocess.Process:
    """The child. Raises CotenantError if, tried a few times, it cannot be started at all."""
    for delay_s in START_DELAYS_S:
        try:
            return await _start_once()
        except OSError as error:
            logger.warning(
                "the process that validates files could not be started (%s); trying again in %g s",
                _described(error),
                delay_s,
            )
        await asyncio.sleep(delay_s)
    try:
        return await _start_once()
    except OSError as error:
        raise CotenantError(
            "The files could not be validated: the process that does it could not be started, in "
            f"{len(START_DELAYS_S) + 1} attempts ({_described(error)}). See that this program is there and that the "
            "machine has memory, processes and open files to spare.",
            code=_FAILED,
        ) from error


async def _start_once() -> asyncio.subprocess.Process:
    return await start_process(
        sys.executable,
        "-m",
        prepare_main.__name__,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C in a terminal is the server's to handle
        env=child_environment(),
    )


def _described(error: OSError) -> str:
    return f"{sys.executable}: {error.strerror or error}"


def _error_of(failure: Failure) -> CotenantError:
    if failure.kind == "system":
        return store_error(OSError(failure.errno, failure.message))
    kind = InvalidInputError if failure.kind == "input" else CotenantError
    return kind(failure.message, code=failure.code or "internal_error", param=failure.param)
