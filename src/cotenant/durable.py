"""Writes that survive a crash: a reader sees the old content or the new, never a torn one."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY_PREFIX = ".tmp-"
_REPLACED_PREFIX = f"{TEMPORARY_PREFIX}replaced-"  # of a folder that holds what was at its name's place
# As tempfile names what it makes, and ``remove_folder`` what goes.
_FILE, _DISCARDED = r"\.tmp-[a-z0-9_]{8}", r"\.tmp-[0-9a-f]{16}"
_IS_TEMPORARY_FILE, _IS_DISCARDED = re.compile(_FILE).fullmatch, re.compile(_DISCARDED).fullmatch
_IS_TEMPORARY = re.compile(rf"{_FILE}|{_DISCARDED}|\.tmp-replaced-[a-z0-9_]{{8}}").fullmatch
# What is left of a disk belongs to the database: it has to say of whatever else did not fit that it did not.
RESERVED_BYTES = 2 * 1024 * 1024


def fsync_path(path: Path) -> None:
    """Flush a file's or a folder's own entry to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def leave_room(path: Path) -> None:
    """Raise OSError (ENOSPC) where the disk that ``path`` is on has less than ``RESERVED_BYTES`` left."""
    disk = os.statvfs(path)
    if disk.f_blocks and disk.f_bavail * disk.f_frsize < RESERVED_BYTES:  # no blocks: it does not say
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Give a temporary sibling folder to fill; on success it becomes ``target`` in one rename, all of it on disk.

    ``target`` must not exist or is replaced, in two renames: a crash between them leaves it to ``remove_leftovers`` to
    put the old one back. On any error, a full disk included, the temporary folder is removed and the target is left as
    it was. A disk is full to it where it would take what the database needs.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    leave_room(target.parent)
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=target.parent))
    try:
        yield temporary
        for path in sorted(temporary.rglob("*")):
            fsync_path(path)
        fsync_path(temporary)
        leave_room(temporary)
        if target.exists():
            _replace(target, temporary)
        else:
            os.replace(temporary, target)
            fsync_path(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _replace(target: Path, folder: Path) -> None:
    """Have ``folder`` take the place of ``target``, whose content goes once that is on disk: deleting takes long."""
    replaced = Path(tempfile.mkdtemp(prefix=_REPLACED_PREFIX, dir=target.parent))
    os.replace(target, replaced / target.name)
    try:
        os.replace(folder, target)
    except BaseException:
        os.replace(replaced / target.name, target)
        replaced.rmdir()
        raise
    fsync_path(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder, if it is there. Its name goes in one rename; a crash leaves the rest to ``remove_leftovers``.

    Needs no room: a full disk is why most folders go.
    """
    discarded = folder.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
    try:
        os.replace(folder, discarded)
    except FileNotFoundError:
        return
    fsync_path(folder.parent)
    shutil.rmtree(discarded, ignore_errors=True)


def write_atomically(target: Path, write: Callable[[Path], None], *, make_folder: bool = True) -> None:
    """Call ``write`` with a temporary path beside ``target``; then flush it and rename it into place. ``make_folder``:
    if its folder is not there, make it; otherwise that is an OSError."""
    if make_folder:
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
    """Delete what a crash left half-written anywhere below ``folder``, which is ours, and put back what was about to be
    replaced. What was not named here stays."""
    for path in [each for each in folder.rglob(f"{_REPLACED_PREFIX}*") if _IS_TEMPORARY(each.name) and each.is_dir()]:
        for old in path.iterdir():
            if not (path.parent / old.name).exists():
                os.replace(old, path.parent / old.name)
                fsync_path(path.parent)
    for path in [each for each in folder.rglob(f"{TEMPORARY_PREFIX}*") if _IS_TEMPORARY(each.name)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def remove_leftovers_in(folder: Path) -> None:
    """The same in ``folder`` alone, where others may have files and folders: files that were to be renamed, and folders
    that ``remove_folder`` had begun to remove."""
    for path in list(folder.glob(f"{TEMPORARY_PREFIX}*")):
        if _IS_TEMPORARY_FILE(path.name) and path.is_file():
            path.unlink(missing_ok=True)
        elif _IS_DISCARDED(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
