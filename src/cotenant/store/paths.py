"""Paths as they are stored."""

from __future__ import annotations

from pathlib import Path


def relative_path(folder: Path, path: str) -> str:
    """``path`` relative to the data folder where it lies in it, so that the data folder can be moved."""
    return str(Path(path).relative_to(folder)) if Path(path).is_relative_to(folder) else path
