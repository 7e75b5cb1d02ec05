"""One worker at a time for one data folder: that of a server that was killed may not have ended yet."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from pathlib import Path

from cotenant.core.errors import ConflictError

logger = logging.getLogger(__name__)

_NAME = "WORKER"
_WAIT_S = 60.0
_LOOK_EVERY_S = 0.05


def lock_worker(folder: Path) -> None:
    """Wait until no other worker uses a data folder; then others wait until this process has ended, however it ends.

    Raises ConflictError if the other one does not end.
    """
    try:
        descriptor = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # never closed
        _wait(descriptor, folder)
    except OSError as error:
        logger.warning("%s cannot be locked: %s", folder / _NAME, error)
        return
    with contextlib.suppress(OSError):  # a full disk; the number is only told
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)


def _wait(descriptor: int, folder: Path) -> None:
    deadline_s, is_told = time.monotonic() + _WAIT_S, False
    while not _try_lock(descriptor):
        process = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        if time.monotonic() > deadline_s:
            raise ConflictError(
                f"The worker of a killed server, process {process}, has not ended within {_WAIT_S:g} s: it may "
                f"still use the device and the data folder {folder}. End it (kill -9 {process}), or see what holds it.",
                code="data_dir_in_use",
                param="data-dir",
            )
        if not is_told:
            logger.warning("waiting for the worker of a server that was killed, process %s, to end", process)
            is_told = True
        time.sleep(_LOOK_EVERY_S)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
