"""What goes wrong with the disk below the store, in words for the user."""

from __future__ import annotations

import errno
import sqlite3

from sqlalchemy.exc import DBAPIError

from cotenant.core.errors import DISK_FULL, CotenantError

STORAGE_ERROR = "storage_error"

_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


class StoreError(CotenantError):
    """The disk could not be written or read; nothing was changed (HTTP 500). ``code`` is ``DISK_FULL``, or
    ``STORAGE_ERROR`` for all else."""

    @property
    def disk_full(self) -> bool:
        return self.code == DISK_FULL


def store_error(error: OSError | DBAPIError) -> StoreError:
    """The user's view of an error of the file system or of SQLite."""
    if is_full(error):
        return StoreError("The disk with the data folder is full. Free some space and try again.", code=DISK_FULL)
    reason = error.strerror if isinstance(error, OSError) else str(error.orig)
    return StoreError(f"The data folder could not be read or written: {reason}.", code=STORAGE_ERROR)


def is_full(error: OSError | DBAPIError) -> bool:
    """Whether there is no room, for anybody or within a quota."""
    if isinstance(error, OSError):
        return error.errno in _FULL_ERRNOS
    original = error.orig
    return isinstance(original, sqlite3.Error) and original.sqlite_errorcode == sqlite3.SQLITE_FULL


def may_be_full(error: DBAPIError) -> bool:
    """Whether room may be what is missing: of a quota that is used up SQLite says no more than that it cannot write."""
    original = error.orig
    failed_write = isinstance(original, sqlite3.Error) and original.sqlite_errorcode == sqlite3.SQLITE_IOERR_WRITE
    return failed_write or is_full(error)
