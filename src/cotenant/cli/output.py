"""How the command line speaks: errors on stderr, everything else on stdout."""

from __future__ import annotations

import json
import os
import shutil
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import typer

USER_ERROR_EXIT_CODE = 2


def fail(message: str, exit_code: int = USER_ERROR_EXIT_CODE) -> NoReturn:
    """Say what is wrong and end the program."""
    print_error(message)
    raise typer.Exit(exit_code)


def print_error(message: str) -> None:
    typer.secho(f"error: {message}", fg=typer.colors.RED, err=True)


def write_json(path: Path, content: object, is_compact: bool = False) -> None:
    """Write what ``--json`` asked for, or say why it cannot be and end the program. A file is replaced as a whole."""
    text = json.dumps(content, indent=None if is_compact else 1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_plain = not path.is_symlink() and (path.is_file() or not path.exists())
        if is_plain and os.access(path.parent, os.W_OK):
            _replace(path, text)
        else:  # a pipe or what is redirected, a file that has another name, or the only one that may be written there
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"--json: {path} cannot be written: {error}", exit_code=1)


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        if path.exists():
            shutil.copymode(path, part)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def local_time(timestamp_s: int | float | None) -> str:
    """A Unix time as people here write it, or a dash."""
    return "-" if timestamp_s is None else datetime.fromtimestamp(timestamp_s).strftime("%Y-%m-%d %H:%M:%S")


def duration(seconds: float) -> str:
    """'42 s', '3 min 20 s' or '2 h 5 min'."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
