"""Keeps one worker process alive: starts it, carries messages to and from it, and starts the next one when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from cotenant.api.prepared import WORKER_COMMAND, PreparedWorker
from cotenant.api.worker_folder import WorkerFolder
from cotenant.config import child_environment
from cotenant.processes import start_process
from cotenant.wire.channel import ApiChannel
from cotenant.wire.messages import FromWorker, Ready, StartFailed, ToWorker

logger = logging.getLogger(__name__)

EXIT_CRASH_LOOP = 1
EXIT_START_FAILED = 2

# After the process is gone its last messages may still be on their way through ZeroMQ's thread, for so long at most
# until it has seen the end of the connection.
_HEAR_OUT_S = 5.0
# So long the last of them may take to be handled, and all of them where it is not known whether there is a connection.
# In many looks: a pause of this process, which stops that thread as well, takes the time of one.
_SETTLE_S = 0.1
_NUM_LOOKS = 10
_START_FAILED_GRACE_S = 5.0
# Workers, one after the other, that died before they were ready, however long they took: a large model loads for longer
# than crashes are counted together.
_MOST_UNREADY = 5


class CrashWindow:
    """Decides how long to wait before the next start, from the crashes of the last ``window_s`` seconds.

    The first restart is immediate, later ones wait longer and longer; ``max_crashes`` in the window end it.
    """

    def __init__(self, max_crashes: int = 5, window_s: float = 60.0, first_delay_s: float = 0.5) -> None:
        self._max_crashes = max_crashes
        self._window_s = window_s
        self._first_delay_s = first_delay_s
        self._crashes_s: deque[float] = deque()

    def record(self, now_s: float) -> float | None:
        """Note a crash at ``now_s``; returns the delay in seconds before the next start, or None to give up."""
        self._crashes_s.append(now_s)
        while self._crashes_s[0] <= now_s - self._window_s:
            self._crashes_s.popleft()
        num_crashes = len(self._crashes_s)
        if num_crashes >= self._max_crashes:
            return None
        return 0.0 if num_crashes == 1 else self._first_delay_s * 2.0 ** (num_crashes - 2)

    def __str__(self) -> str:
        return f"{self._max_crashes} times within {self._window_s:g} s"


class WorkerEvents(Protocol):
    """What the supervisor tells its owner. Called on the event loop, one at a time, in order."""

    def on_message(self, message: FromWorker) -> None:
        """The worker that runs now sent this."""

    def on_lost(self, reason: str) -> None:
        """The worker is gone. Nothing more comes from it; another one may be started."""

    def on_give_up(self, message: str, exit_code: int) -> None:
        """There will be no other worker: ``message`` says why."""


@dataclass(slots=True)
class _Life:
    """One worker process with its own folder, address and channel, none of which is ever used again."""

    process: asyncio.subprocess.Process | PreparedWorker
    channel: ApiChannel
    folder: WorkerFolder
    outbox: asyncio.Queue[ToWorker] = field(default_factory=asyncio.Queue)
    num_received: int = 0
    was_ready: bool = False

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


class Supervisor:
    """Owns the worker process. Use it from one event loop that runs in the main thread: the worker asks the kernel to
    end it when the *thread* that forked it ends.

    ``config_json`` is what the next worker reads as its configuration; it must not hold the API key.
    """

    def __init__(
        self,
        config_json: bytes,
        events: WorkerEvents,
        command: Sequence[str] = WORKER_COMMAND,
        crashes: CrashWindow | None = None,
        prepared: PreparedWorker | None = None,
    ) -> None:
        """``prepared``: is the first worker, if it is there by then."""
        self._prepared = prepared
        self._num_unready = 0
        self.config_json = config_json
        self._events = events
        self._command = tuple(command)
        self._crashes = crashes or CrashWindow()
        self._has_crashed = False
        self._life: _Life | None = None
        self._start_failed: str | None = None
        self._last_life = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The worker's process id, or None while there is none."""
        return self._life.process.pid if self._life else None

    def start(self) -> None:
        assert self._task is None, "a supervisor starts once"
        self._task = asyncio.create_task(self._supervise(), name="worker-supervisor")

    def post(self, message: ToWorker) -> None:
        """Send ``message`` to the worker that runs now, after all that was posted before; lost if it dies first."""
        if self._life is not None:
            self._life.outbox.put_nowait(message)

    def expect_exit(self) -> None:
        """The worker that runs now is the last one: when it exits, ``wait`` returns."""
        self._last_life.set()

    async def wait(self) -> None:
        """Return when there is no worker and none will be started."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Kill the worker and start no other."""
        self.expect_exit()
        self.kill()
        await self.wait()

    def kill(self) -> None:
        """SIGKILL the worker that runs now, if any."""
        if self._life is not None:
            self._life.kill()

    async def _supervise(self) -> None:
        while not self._last_life.is_set():
            try:
                reason = await self._run_once()
            except Exception as error:
                logger.exception("the worker process could not be started")
                reason = f"could not be started with {self._command[0]}: {error}"
            self._events.on_lost(reason)
            if self._start_failed is not None:
                self._give_up(self._start_failed, EXIT_START_FAILED)
            elif not self._last_life.is_set():
                await self._after_crash(reason)

    async def _after_crash(self, reason: str) -> None:
        """Wait before the next start, or give up."""
        self._has_crashed = True
        delay_s = self._crashes.record(time.monotonic())
        if delay_s is None:
            self._give_up(f"the worker died {self._crashes}; the last time it {reason}", EXIT_CRASH_LOOP)
            return
        if self._num_unready >= _MOST_UNREADY:
            often = f"{self._num_unready} times before it was ready"
            self._give_up(f"the worker died {often}; the last time it {reason}", EXIT_CRASH_LOOP)
            return
        logger.error("the worker %s; starting another one in %.1f s", reason, delay_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._last_life.wait(), delay_s)

    def _give_up(self, message: str, exit_code: int) -> None:
        logger.error("%s", message)
        self._last_life.set()
        self._events.on_give_up(message, exit_code)

    async def _run_once(self) -> str:
        """Run one worker from start to end; returns how it ended, in words that follow 'the worker'."""
        life = await self._launch()
        self._life = life
        if self._last_life.is_set():  # stopped while the process was being made
            life.kill()
        tasks = [
            asyncio.create_task(self._read(life), name="worker-reader"),
            asyncio.create_task(self._write(life), name="worker-writer"),
        ]
        try:
            returncode = await life.process.wait()
            await _hear_out(life)
            return describe_exit(returncode)
        finally:
            self._life = None
            self._num_unready = 0 if life.was_ready else self._num_unready + 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            life.kill()
            life.channel.close()
            life.folder.remove()

    async def _launch(self) -> _Life:
        folder = WorkerFolder(self.config_json)
        channel: ApiChannel | None = None
        try:
            channel = ApiChannel(folder.address)
            arguments = ["--address", folder.address, "--config", str(folder.config_path)]
            arguments += ["--parent-pid", str(os.getpid()), *(["--after-crash"] if self._has_crashed else [])]
            process = await self._start(arguments)
        except BaseException:
            if channel is not None:
                channel.close()
            folder.remove()
            raise
        logger.info("worker %d started", process.pid)
        return _Life(process, channel, folder)

    async def _start(self, arguments: Sequence[str]) -> asyncio.subprocess.Process | PreparedWorker:
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared.begin(arguments):
            return prepared
        # Its own session: Ctrl-C in a terminal reaches only the API process, which then drains the worker.
        return await start_process(
            *self._command,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            env=child_environment(),
        )

    async def _read(self, life: _Life) -> None:
        while True:
            try:
                message = await life.channel.receive()
            except msgspec.MsgspecError:
                logger.exception("unreadable message from the worker")
                continue
            life.num_received += 1
            if isinstance(message, Ready | StartFailed):
                # Connected and configured: neither the socket's path nor the file is needed any more, and if this
                # process is killed nobody would remove them before the next one.
                life.folder.remove()
            life.was_ready = life.was_ready or isinstance(message, Ready)
            if isinstance(message, StartFailed):
                self._start_failed = message.message
                asyncio.get_running_loop().call_later(_START_FAILED_GRACE_S, life.kill)
            try:
                self._events.on_message(message)
            except Exception:
                logger.exception("%s from the worker could not be handled", type(message).__name__)

    async def _write(self, life: _Life) -> None:
        while True:
            message = await life.outbox.get()
            try:
                await life.channel.send(message)
            except Exception:
                logger.exception("%s could not be sent to the worker", type(message).__name__)


async def _hear_out(life: _Life) -> None:
    """Let the reader have what a worker that has ended said before."""
    if life.num_received > 0:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(life.channel.heard_out(), _HEAR_OUT_S)
    seen = -1
    while seen != life.num_received:
        seen = life.num_received
        for _ in range(_NUM_LOOKS):
            await asyncio.sleep(_SETTLE_S / _NUM_LOOKS)


def describe_exit(returncode: int) -> str:
    """How a process ended, in words: 'exited with code 3', 'was killed by SIGKILL'."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    hint = " (out of memory?)" if returncode == -signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
