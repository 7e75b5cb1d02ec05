"""The processes of bench/compare_sharing.py: a server, and training by another library that goes on until it is ended.

Each has a session of its own, so that Ctrl-C reaches the script alone, and a log that is kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.05


class SharingError(Exception):
    """One of the processes did not do its part; the message says which and where its log is."""


@contextlib.contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], output: Path, errors: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """The process for the time of a `with` block; with ``environment`` beside this process's own."""
    with output.open("wb") as out, errors.open("ab") as err:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT if output == errors else err,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):  # what is left of its session, all of it ours
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tail(path: Path) -> str:
    """The last line that says something."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it has said nothing"


def last_error(path: Path) -> str:
    """The last line that names an error; else the last line that says something."""
    named = re.findall(r"^.*\w*Error: .*$", path.read_text(errors="replace"), re.MULTILINE)
    return named[-1].strip() if named else tail(path)


@dataclass(slots=True)
class Training:
    """What bench/peer_training.py prints with ``--endless``. ``setting``: its first line."""

    process: subprocess.Popen[bytes]
    output: Path
    log: Path
    setting: dict[str, Any] = field(default_factory=dict)
    num_steps: int = 0
    _ends: list[tuple[float, int]] = field(default_factory=list)
    _num_read: int = 0

    def wait_for_steps(self, num_steps: int, timeout_s: float) -> None:
        """Until it has done so many. Raises SharingError if it ends before, or takes longer."""
        self._wait(lambda: self.num_steps >= num_steps, f"step {num_steps}", timeout_s)

    @property
    def last_end_s(self) -> float:
        """When the last step ended, on ``time.monotonic()``."""
        return self._ends[-1][0]

    def tokens_per_s(self, start_s: float, end_s: float, timeout_s: float) -> float:
        """Trained in this time, on ``time.monotonic()``; tokens count evenly over a micro-batch. Waits for the step
        that the time ends in. Raises SharingError."""
        self._wait(lambda: bool(self._ends) and self.last_end_s >= end_s, "the step under way", timeout_s)
        assert self._ends[0][0] <= start_s, "training had not begun"
        times, tokens = zip(*self._ends, strict=True)
        first, last = np.interp([start_s, end_s], times, tokens)
        return float(last - first) / (end_s - start_s)

    def _wait(self, condition: Any, what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            self._read()
            if condition():
                return
            if self.process.poll() is not None:
                raise SharingError(f"training ended with code {self.process.returncode}: {tail(self.log)} ({self.log})")
            if time.monotonic() > deadline:
                raise SharingError(f"training had not done {what} within {timeout_s:g} s; see {self.log}")
            time.sleep(_POLL_S)

    def _read(self) -> None:
        with self.output.open("rb") as file:
            file.seek(self._num_read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._num_read += len(whole) + len(newline)
        for text in whole.splitlines():
            if not text.startswith(b"{"):  # a library that has something to say
                continue
            line = json.loads(text)
            if "ends" not in line:
                self.setting = line
                continue
            self.num_steps = line["step"]
            self._ends += [(at_s, tokens) for at_s, tokens in line["ends"]]


@contextlib.contextmanager
def training(command: Sequence[str], environment: Mapping[str, str], logs: Path, name: str) -> Iterator[Training]:
    """Training for the time of a `with` block; in ``logs``, ``training-NAME.jsonl`` has its steps and
    ``training-NAME.log`` what else it says."""
    output, log = logs / f"training-{name}.jsonl", logs / f"training-{name}.log"
    log.unlink(missing_ok=True)
    with running(command, environment, output, log) as process:
        yield Training(process, output, log)
