"""The folder that `cotenant demo` writes its report into: which files in it are the demo's, and may be replaced."""

from __future__ import annotations

import json
from pathlib import Path

REPORT, PAGE, LOG = "report.json", "report.html", "server.log"
_LOG_BEGINNING = b"# the servers of `cotenant demo`, one after the other\n"
_REPORT_KEYS = {"model", "policy", "online", "finetune", "answers"}


def may_hold_a_demo(folder: Path) -> bool:
    """Whether there is nothing in a folder's place, an empty folder, or an earlier demo's: its name came from a person,
    who may have mistyped it. Raises OSError."""
    if not folder.exists():
        return True
    return folder.is_dir() and (not any(folder.iterdir()) or _has_report(folder) or _has_log(folder))


def prepare(folder: Path) -> None:
    """Make a folder that ``may_hold_a_demo``, and replace what an earlier one has written there by an empty log. What
    else there is stays. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (REPORT, PAGE, LOG):
        (folder / name).unlink(missing_ok=True)
    (folder / LOG).write_bytes(_LOG_BEGINNING)


def _has_report(folder: Path) -> bool:
    try:
        report = json.loads((folder / REPORT).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(report, dict) and report.keys() >= _REPORT_KEYS


def _has_log(folder: Path) -> bool:
    try:
        with (folder / LOG).open("rb") as file:
            return file.read(len(_LOG_BEGINNING)) == _LOG_BEGINNING
    except OSError:
        return False
