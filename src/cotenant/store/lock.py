"""One server, or one `cotenant profile`, for one data folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from cotenant.core.errors import ConflictError, InvalidInputError
from cotenant.store.errors import is_full, store_error

LOCK_NAME = "LOCK"


class FolderLock:
    """An exclusive lock on a data folder. The kernel releases it when the process ends, however it ends."""

    def __init__(self, folder: Path, holder: str) -> None:
        """``holder``: what others are told of this process. Raises ConflictError if another process holds it."""
        self._descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            process, _, other = os.pread(self._descriptor, 64, 0).decode(errors="replace").strip().partition(" ")
            os.close(self._descriptor)
            raise ConflictError(
                f"The data folder {folder} is in use by {other or 'a server'}"
                f"{f' (process {process})' if process else ''}. Stop it, or choose another folder with --data-dir.",
                code="data_dir_in_use",
                param="data-dir",
            ) from None
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()} {holder}\n".encode(), 0)
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        os.close(self._descriptor)


def lock_folder(folder: Path, holder: str) -> FolderLock:
    """Lock a data folder, made if it isn't there. Raises ConflictError if another process uses it, InvalidInputError if
    it cannot be used at all, StoreError if the disk is full."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return FolderLock(folder, holder)
    except OSError as error:
        if is_full(error):
            raise store_error(error) from error
        reason = "it is a file" if folder.is_file() else error.strerror
        raise InvalidInputError(
            f"The data folder {folder} cannot be used: {reason}. Choose another one with --data-dir.",
            code="bad_data_dir",
            param="data-dir",
        ) from error
