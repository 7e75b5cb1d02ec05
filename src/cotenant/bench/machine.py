"""What a measurement ran on and how it was started, as it stands beside its figures."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path


def cpu_name() -> str:
    """The processor's name as the kernel gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, object]:
    """CPU, its cores, and the GPUs that ``nvidia-smi`` lists."""
    return {"cpu": cpu_name(), "num_cores": os.cpu_count(), "gpus": _gpus()}


def versions() -> dict[str, str | None]:
    """Of Python and of packages, None for one that is not installed. Imports none of them."""
    return {"python": platform.python_version(), **{name: _version(name) for name in ("cotenant", "torch")}}


def command_line(words: Sequence[str], secret_flags: Sequence[str] = ()) -> str:
    """A command as it can be shown to others: absolute paths by their names alone, ``--flag=/such/ones`` too, and the
    values of these flags hidden."""
    shown: list[str] = []
    hide_next = False
    for word in words:
        flag, has_value, value = word.partition("=")
        if hide_next:
            shown.append("***")
        elif flag in secret_flags and has_value:
            shown.append(f"{flag}=***")
        elif flag.startswith("-") and has_value:
            shown.append(f"{flag}={_without_folder(value)}")
        else:
            shown.append(_without_folder(word))
        hide_next = not hide_next and word in secret_flags
    return shlex.join(shown)


def _without_folder(word: str) -> str:
    """A path of this machine by its last part; what only looks like one, as a URL's path does, as it is."""
    path = Path(word)
    return path.name if path.is_absolute() and len(path.parts) > 1 and Path("/", path.parts[1]).exists() else word


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]
