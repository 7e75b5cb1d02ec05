"""Files are written on one background thread, in order, and what that gives is announced in the same order."""

from __future__ import annotations

import errno
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import safetensors

from cotenant.wire.messages import FromWorker

logger = logging.getLogger(__name__)

WriteTask = Callable[[], Sequence[FromWorker]]

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class WriteError(Exception):
    """A file could not be written. ``code`` is the job's error code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class FileWriter:
    """Runs write tasks one after the other on its own thread. After one has failed the later ones are not run."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"writer-{name}")
        self._tasks: deque[Future[Sequence[FromWorker]]] = deque()
        self._failed = False  # owned by the writer's thread

    def submit(self, task: WriteTask) -> Future[Sequence[FromWorker]]:
        """Queue a task. It returns the messages that may be sent once it is done; it owns all that it uses. What is
        handed back tells when it is over; ``take`` gives the messages."""
        self._tasks.append(self._executor.submit(self._run, task))
        return self._tasks[-1]

    def take(self) -> list[FromWorker]:
        """The messages of the tasks done since the last call, in order.

        Raises:
            WriteError: a task failed; the messages before it have been taken earlier.
        """
        messages: list[FromWorker] = []
        while self._tasks and self._tasks[0].done():
            if messages and self._tasks[0].exception() is not None:
                break  # hand out what succeeded before; the next call raises
            messages.extend(self._tasks.popleft().result())
        return messages

    @property
    def idle(self) -> bool:
        """Whether nothing is being written or waiting to be taken."""
        return not self._tasks

    def wait(self) -> None:
        """Block until every queued task has run."""
        wait(list(self._tasks))

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._executor.shutdown(wait=True)

    def _run(self, task: WriteTask) -> Sequence[FromWorker]:
        if self._failed:
            return ()
        try:
            return task()
        except (OSError, safetensors.SafetensorError) as error:
            self._failed = True
            raise as_write_error(error) from error
        except Exception as error:
            self._failed = True
            logger.exception("a file of the job could not be written")
            raise WriteError("internal_error", f"{type(error).__name__}: {error}") from error


def as_write_error(error: OSError | safetensors.SafetensorError) -> WriteError:
    """What went wrong, for the job's owner. safetensors reports the system's errors as text only."""
    full = isinstance(error, OSError) and error.errno in _DISK_FULL
    if full or any(f"(os error {number})" in str(error) for number in _DISK_FULL):
        return WriteError("disk_full", f"The disk with the data folder is full ({error}). Free some space.")
    return WriteError("io_error", f"A file of the job could not be written: {error}.")
