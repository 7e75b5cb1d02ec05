"""Files that are written anew: what may be in their place, and what becomes of that."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from cotenant.core.errors import InvalidInputError

BEGINNING = b"[\n"  # of each trace


def make_way(path: Path, num_kept: int = 1) -> None:
    """Rename a file that is there, with ``.old`` behind its name; one that is empty is left. ``num_kept``: how many
    stay at most, those from before as ``.old.2``, ``.old.3`` and so on. Raises OSError."""
    if not (path.is_file() and path.stat().st_size):
        return
    names = [f"{path.name}.old", *(f"{path.name}.old.{number}" for number in range(2, num_kept + 1))]
    old = [path.with_name(name) for name in names]
    first_free = next((index for index, each in enumerate(old) if not each.exists()), num_kept - 1)
    for index in range(first_free, 0, -1):
        old[index - 1].replace(old[index])
    path.replace(old[0])


def check_trace_file(path: Path) -> None:
    """Raise InvalidInputError unless nothing is there, or an earlier trace, which will make way: anything else would be
    gone from its place, and somebody may need it there."""
    try:
        if path.is_dir():
            raise InvalidInputError(f"--trace-file: {path} is a folder; name a file in it", param="trace-file")
        if path.exists() and not _is_trace(path):
            raise InvalidInputError(
                f"--trace-file: {path} is there and is no trace; name another file", param="trace-file"
            )
    except OSError as error:
        raise InvalidInputError(f"--trace-file: {path} cannot be written: {error}", param="trace-file") from error


def _is_trace(path: Path) -> bool:
    """Whether a file is one, or is empty. Raises InvalidInputError for one that somebody writes."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        if not claim(file):
            raise InvalidInputError(
                f"--trace-file: another server is writing {path}; name another file", param="trace-file"
            )
        return file.read(len(BEGINNING)) in (b"", BEGINNING)


def claim(file: IO[bytes]) -> bool:
    """Claim a file for as long as it is open: whether nobody else has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True
