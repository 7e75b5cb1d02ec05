"""How the command line speaks: errors on stderr, everything else on stdout."""

from __future__ import annotations

import json
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
    whole = path if path.exists() and not path.is_file() else path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole.write_text(json.dumps(content, indent=None if is_compact else 1) + "\n", encoding="utf-8")
        if whole != path:
            whole.replace(path)
    except OSError as error:
        fail(f"--json: {path} cannot be written: {error}", exit_code=1)


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
