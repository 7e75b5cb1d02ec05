"""Writes that survive a crash: a reader sees the old content or the new, never a torn one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY_PREFIX = ".tmp-"


def fsync_path(path: Path) -> None:
    """Flush a file's or a folder's own entry to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Give a temporary sibling folder to fill; on success it becomes ``target`` in one rename, all of it on disk.

    ``target`` must not exist or is replaced. On any error, a full disk included, the temporary folder is removed and
    the target is left as it was.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=target.parent))
    try:
        yield temporary
        for path in sorted(temporary.rglob("*")):
            fsync_path(path)
        fsync_path(temporary)
        if target.exists():
            discarded = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=target.parent))
            os.replace(target, discarded / target.name)
            shutil.rmtree(discarded, ignore_errors=True)
        os.replace(temporary, target)
        fsync_path(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_atomically(target: Path, write: Callable[[Path], None]) -> None:
    """Call ``write`` with a temporary path beside ``target``; then flush it and rename it into place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=target.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        write(temporary)
        fsync_path(temporary)
        os.replace(temporary, target)
        fsync_path(target.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_leftovers(folder: Path) -> None:
    """Delete what a crash left half-written anywhere below ``folder``."""
    for path in list(folder.rglob(f"{TEMPORARY_PREFIX}*")):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
