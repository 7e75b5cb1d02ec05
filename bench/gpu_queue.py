"""Commands side by side, each on a GPU and a share of the cores of its own, until a time is over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cotenant.processes import die_with_parent

CUT_OFF = 3  # exit code of a script that did not come to its end
_POLL_S = 0.2
_ENDING_S = 20.0  # for a process that is told to end


@dataclass
class Work:
    """A command, run in ``folder``. What it prints is added to ``log``; ``stdout``: but not what it prints there, which
    replaces that file. ``expected_s``: it is not begun if less is left; 0: whatever is left, as one that goes on where
    it was cut off."""

    name: str
    command: Sequence[str]
    log: Path
    folder: Path = field(default_factory=Path.cwd)
    stdout: Path | None = None
    expected_s: float = 0.0
    process: subprocess.Popen[bytes] | None = None
    was_ended: bool = False

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def failed(self) -> bool:
        return self.process is not None and not self.was_ended and self.process.poll() not in (None, 0)


def gpus_to_use(num_gpus: int) -> list[str]:
    """So many of those that this process may use. Raises ValueError if there are fewer."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = list(map(str, range(num_gpus))) if visible is None else visible.split(",")[:num_gpus]
    if not 1 <= num_gpus == len(gpus):
        raise ValueError(f"{num_gpus} of CUDA_VISIBLE_DEVICES={visible}")
    return gpus


def run(
    works: Sequence[Work], gpus: Sequence[str], seconds: float, has_ended: Callable[[Work], None] = lambda work: None
) -> bool:
    """One after the other on each GPU, in this order; whether all ended by themselves. What still runs when the time is
    over, or this process is told to end, gets SIGINT. ``has_ended`` hears of each that ended by itself, as it does."""
    # What a handler raises may be lost: where a process is forked, Python ignores it.
    told_to_end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.set())
    end_s = time.monotonic() + seconds
    cores = sorted(os.sched_getaffinity(0))
    waiting, busy, told = list(works), dict[str, Work](), set[str]()

    def tell() -> None:
        for work in works:
            if work.name not in told and work.process is not None and not work.running and not work.was_ended:
                told.add(work.name)
                has_ended(work)

    is_whole = True
    try:
        while waiting or any(work.running for work in busy.values()):
            tell()
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return False
            for index, gpu in enumerate(gpus):
                work = next((each for each in waiting if each.expected_s <= left_s), None)
                if work is not None and not (gpu in busy and busy[gpu].running):
                    share = cores[index * len(cores) // len(gpus) : (index + 1) * len(cores) // len(gpus)]
                    waiting.remove(work)
                    busy[gpu] = work
                    _start(work, gpu, share or cores)
            if waiting and all(each.expected_s > left_s for each in waiting):
                is_whole, waiting = False, []
            if told_to_end.wait(_POLL_S):
                sys.exit(128 + signal.SIGTERM)
    finally:
        _end([work for work in works if work.running])
        tell()
    return is_whole


def _start(work: Work, gpu: str, cores: Sequence[int]) -> None:
    """In a session of its own: Ctrl-C is this process's to handle."""
    parent = os.getpid()

    def prepare() -> None:
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.sched_setaffinity(0, cores)

    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    with work.log.open("ab") as log, (work.stdout or Path(os.devnull)).open("wb") as stdout:
        work.process = subprocess.Popen(
            work.command,
            cwd=work.folder,
            stdin=subprocess.DEVNULL,
            stdout=log if work.stdout is None else stdout,
            stderr=log,
            env=environment,
            start_new_session=True,
            preexec_fn=prepare,
        )


def _end(running: Sequence[Work]) -> None:
    processes = [work.process for work in running if work.process is not None]
    for work in running:
        work.was_ended = True
    for process in processes:
        process.send_signal(signal.SIGINT)
    end_s = time.monotonic() + _ENDING_S
    for process in processes:
        try:
            process.wait(max(0.0, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
