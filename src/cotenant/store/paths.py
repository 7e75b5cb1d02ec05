"""Paths as they are stored, and the folders that they lead to."""

from __future__ import annotations

import os
from pathlib import Path

from cotenant.core.errors import InvalidInputError
from cotenant.store.errors import is_full, store_error


def make_usable(folder: Path) -> None:
    """Make a folder of the data folder's if it isn't there. Raises InvalidInputError if something else is in its place,
    or if files cannot be put there, StoreError if the disk is full."""
    reason = None
    try:
        folder.mkdir(exist_ok=True)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            reason = "it cannot be read and written"
    except FileExistsError:
        reason = "it is a link to nothing" if folder.is_symlink() else "it is no folder"
    except OSError as error:
        if is_full(error):
            raise store_error(error) from error
        reason = error.strerror
    if reason is not None:
        raise InvalidInputError(
            f"{folder} cannot be used: {reason}. Mend or move it, or choose another data folder with --data-dir.",
            code="bad_data_dir",
            param="data-dir",
        )


def relative_path(folder: Path, path: str) -> str:
    """``path`` relative to the data folder where it lies in it, so that the data folder can be moved."""
    return str(Path(path).relative_to(folder)) if Path(path).is_relative_to(folder) else path
