"""How the command line speaks: errors and progress on stderr, everything else on stdout."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import typer

from cotenant.bench.json_text import json_text
from cotenant.core.errors import InvalidInputError

USER_ERROR_EXIT_CODE = 2


def fail(message: str, exit_code: int = USER_ERROR_EXIT_CODE) -> NoReturn:
    """Say what is wrong and end the program."""
    print_error(message)
    raise typer.Exit(exit_code)


def print_error(message: str) -> None:
    """Red on a terminal, unless NO_COLOR says otherwise (https://no-color.org)."""
    color = False if os.environ.get("NO_COLOR") else None
    typer.secho(f"error: {message}", fg=typer.colors.RED, err=True, color=color)


def drop_output() -> None:
    """Forget what was printed and stdout does not take; the interpreter would try again as it ends, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say_phase(phase: str) -> None:
    """A line for a phase that takes its time, as it begins."""
    typer.echo(phase, err=True)


def check_outputs(**paths: Path | None) -> None:
    """Raise InvalidInputError where the file of a flag (``json=…``: ``--json``) could not be written: before what is to
    be in it is measured. Nothing is made or changed."""
    for flag, path in paths.items():
        if path is None:
            continue
        try:
            if path.is_dir():
                raise InvalidInputError(f"--{flag}: {path} is a folder; name a file in it", param=flag)
            if not path.exists() or _is_replaced(path):
                check_folder(flag, Path(os.path.realpath(path)).parent if path.is_symlink() else path.parent)
            elif not os.access(path, os.W_OK):
                raise InvalidInputError(f"--{flag}: {path} may not be written; name another file", param=flag)
        except OSError as error:
            raise InvalidInputError(f"--{flag}: {path} cannot be written: {error.strerror}", param=flag) from error


def check_apart(outputs: Mapping[str, Path | None], inputs: Iterable[Path] = ()) -> None:
    """Raise InvalidInputError where a file that is to be written, by its flag, is another one's too, or is read."""
    known = {path.resolve(): f"{path} is read in this run" for path in inputs}
    for flag, path in outputs.items():
        if path is None:
            continue
        if taken := known.get(path.resolve()):
            raise InvalidInputError(f"--{flag}: {taken}; name another file", param=flag)
        known[path.resolve()] = f"{path} is the file of --{flag}"


def check_folder(flag: str, folder: Path) -> None:
    """Raise InvalidInputError where nothing could be written in ``folder``, which may have to be made first. Nothing is
    left there."""
    there = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    if not there.is_dir():
        raise InvalidInputError(f"--{flag}: {there} is not a folder; name another path", param=flag)
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise InvalidInputError(
            f"--{flag}: nothing can be written in {there}: {error.strerror}; name another path", param=flag
        ) from error


def write_json(path: Path, content: object, is_compact: bool = False) -> None:
    """Write what ``--json`` asked for, or say why it cannot be and end the program. A file is replaced as a whole."""
    write_text("json", path, json_text(content, indent=None if is_compact else 1))


def write_text(flag: str, path: Path, text: str) -> None:
    """The same for any flag and text."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if _is_replaced(path):
            _replace(path, text)
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"--{flag}: {path} cannot be written: {error}", exit_code=1)


def _is_replaced(path: Path) -> bool:
    """Not a pipe or what is redirected, a file that has another name, or the only one that may be written there."""
    is_plain = not path.is_symlink() and (path.is_file() or not path.exists())
    return is_plain and os.access(path.parent, os.W_OK)


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


def counted(number: int, noun: str) -> str:
    """'1 step' or '2 steps'."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """'42 s', '3 min 20 s' or '2 h 5 min'."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
