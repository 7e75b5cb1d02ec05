"""A worker process that is started before it is known what for: it imports what it needs, which takes seconds, while
the API process does the same."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from cotenant.config import child_environment
from cotenant.core.errors import CotenantError

logger = logging.getLogger(__name__)

WORKER_COMMAND = (sys.executable, "-m", "cotenant.runtime.worker")


class PreparedWorker:
    """Use it as a context manager, from the thread that lives as long as the worker is to: what was not begun by the
    end is killed. Once begun it is a process as asyncio's are: ``pid``, ``kill`` and ``wait``."""

    def __init__(self, command: Sequence[str] = WORKER_COMMAND) -> None:
        """Raises CotenantError if there can be no such process."""
        try:
            # Its own session: Ctrl-C in a terminal reaches only the API process.
            self._process = subprocess.Popen(
                (*command, "--wait"), stdin=subprocess.PIPE, start_new_session=True, env=child_environment()
            )
        except OSError as error:
            reason = error.strerror or str(error)
            raise CotenantError(f"the worker process cannot be started with {command[0]!r}: {reason}") from error
        self._has_begun = False

    def __enter__(self) -> PreparedWorker:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._has_begun:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, arguments: Sequence[str]) -> bool:
        """Hand over its command line; False if it has died before."""
        assert self._process.stdin is not None
        if self._process.poll() is not None:
            logger.warning("the worker that was started ahead has ended with code %d", self._process.returncode)
            return False
        try:
            self._process.stdin.write(msgspec.json.encode(list(arguments)) + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            logger.warning("the worker that was started ahead does not listen: %s", error)
            return False
        self._has_begun = True
        return True

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> int:
        """Its exit code, negative if a signal ended it."""
        return await asyncio.get_running_loop().run_in_executor(None, self._process.wait)
