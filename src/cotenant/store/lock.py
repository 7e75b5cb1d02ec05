"""One server for one data folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from cotenant.core.errors import ConflictError

LOCK_NAME = "LOCK"


class FolderLock:
    """An exclusive lock on a data folder. The kernel releases it when the process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        """Raises ConflictError if another process holds it."""
        self._descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise ConflictError(
                f"The data folder {folder} is in use by another server"
                f"{f' (process {holder})' if holder else ''}. Stop it, or choose another folder with --data-dir.",
                code="data_dir_in_use",
                param="data-dir",
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._descriptor)
