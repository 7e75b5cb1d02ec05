"""What goes wrong with the disk below the store, in words for the user."""

from __future__ import annotations

import errno
import sqlite3

from sqlalchemy.exc import DBAPIError

from cotenant.core.errors import CotenantError

DISK_FULL = "disk_full"
STORAGE_ERROR = "storage_error"

_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


class StoreError(CotenantError):
    """The disk could not be written or read; nothing was changed (HTTP 500). ``code`` is one of the two above."""

    @property
    def disk_full(self) -> bool:
        return self.code == DISK_FULL


def store_error(error: OSError | DBAPIError) -> StoreError:
    """The user's view of an error of the file system or of SQLite."""
    if _is_full(error):
        return StoreError("The disk with the data folder is full. Free some space and try again.", code=DISK_FULL)
    reason = error.strerror if isinstance(error, OSError) else str(error.orig)
    return StoreError(f"The data folder could not be read or written: {reason}.", code=STORAGE_ERROR)


def _is_full(error: OSError | DBAPIError) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL_ERRNOS
    original = error.orig
    return isinstance(original, sqlite3.Error) and original.sqlite_errorcode == sqlite3.SQLITE_FULL
