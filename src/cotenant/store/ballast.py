"""Disk space set aside for the one moment when there is none: to record that the disk is full."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from cotenant.durable import RESERVED_BYTES, write_atomically

logger = logging.getLogger(__name__)

BALLAST_NAME = "BALLAST"


class Ballast:
    """A file that is deleted when the database finds the disk full, so that it can write a job's failure. Whoever else
    writes much leaves it that space, see ``durable.leave_room``."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / BALLAST_NAME

    def restore(self) -> None:
        """Put the file in place if it is not there. A disk that is full already is no error."""
        if self._path.exists():
            return
        try:
            write_atomically(self._path, lambda path: _fill(path))
        except OSError as error:
            logger.warning("no disk space could be set aside for the database: %s", error.strerror)

    def release(self) -> bool:
        """Give the space to whoever writes next. False if it was given before."""
        try:
            os.unlink(self._path)
        except OSError:
            return False
        logger.error("the data folder's disk or quota is full, or the disk fails: the database takes its reserve")
        return True


def _fill(path: Path) -> None:
    # Not zeros: a file system that compresses would set nothing aside.
    path.write_bytes(os.urandom(RESERVED_BYTES))
