"""Memory of a process and all below it, from Linux's /proc."""

from __future__ import annotations

import os
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def tree(pid: int) -> list[int]:
    """``pid`` and the processes below it. Raises ProcessLookupError if there is none."""
    parents = {int(entry.name): _parent(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    if parents.get(pid) is None:
        raise ProcessLookupError(pid)
    found = [pid]
    for ancestor in found:
        found += [child for child, parent in parents.items() if parent == ancestor]
    return found


def resident_bytes(pid: int) -> int:
    """Resident set sizes of ``pid`` and all below it, summed; pages they share count for each. 0 if it is gone."""
    try:
        pids = tree(pid)
    except ProcessLookupError:
        return 0
    return sum(_resident_bytes(one) for one in pids)


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _parent(entry: Path) -> int | None:
    """A process's parent; None if it has ended, or is ending."""
    try:
        # The name, in parentheses, may hold anything.
        state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else int(parent)
