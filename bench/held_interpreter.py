"""What keeps a thread waiting for the interpreter, and for memory: one sleeps for a moment, again and again, as the
worker's loop waits for the device; another one runs Python, reads and writes files of tensors, or frees memory.

    python bench/held_interpreter.py

For each: how long it takes, and how much later than asked for the sleeper wakes up. Runs on a CPU. The interpreter's
switch interval is the worker's, or Python's own where that is said.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import safetensors
import torch
from safetensors.torch import load, save_file

from cotenant.bench.machine import machine
from cotenant.device.transfer import host_tensor
from cotenant.models.tensors_in_memory import read_tensors
from cotenant.runtime.worker_process import SWITCH_S

# As much as an adapter of rank 16 has for all linear layers of an 8B model, one tensor of three in a checkpoint.
_NUM_WEIGHTS, _NUM_TENSORS = 42_000_000, 1000
_SLEEP_S = 2e-4
_LEAST_S = 0.5  # of a case: it is run again until then
_PYTHONS_OWN_S = 5e-3
_NUM_OBJECTS = 1_000_000


def show(name: str, run: Callable[[], object], switch_s: float = SWITCH_S) -> None:
    took_s: list[float] = []
    late_ms: list[float] = []

    def timed() -> None:
        until_s = time.perf_counter() + _LEAST_S
        while time.perf_counter() < until_s:
            begin_s = time.perf_counter()
            run()
            took_s.append(time.perf_counter() - begin_s)

    sys.setswitchinterval(switch_s)
    thread = threading.Thread(target=timed)
    thread.start()
    while thread.is_alive():
        begin_s = time.perf_counter()
        time.sleep(_SLEEP_S)
        late_ms.append((time.perf_counter() - begin_s - _SLEEP_S) * 1e3)
    thread.join()
    late_ms.sort()
    p50, p99 = (late_ms[len(late_ms) * percent // 100] for percent in (50, 99))
    took_ms = sorted(took_s)[len(took_s) // 2] * 1e3
    print(
        f"{name:48s} took {took_ms:7.1f} ms; late by p50 {p50:.2f}, p99 {p99:.2f}, max {late_ms[-1]:.2f} ms", flush=True
    )


def count() -> int:
    """Python, and nothing else, for some tens of milliseconds."""
    total = 0
    for number in range(500_000):
        total += number
    return total


class Freed:
    """Memory that was written to, had from ``make`` before it is timed how long it takes to free it."""

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self._make = make
        self._took_s: list[float] = []

    def show(self, name: str) -> None:
        """On the thread that frees it; nobody else does anything."""
        for _ in range(5):
            tensor = self._make().fill_(1.0)
            begin_s = time.perf_counter()
            del tensor
            self._took_s.append(time.perf_counter() - begin_s)
        self._took_s.sort()
        least, median, most = (self._took_s[place] * 1e3 for place in (0, 2, 4))
        print(f"{name:48s} took {median:7.2f} ms, {least:.2f} to {most:.2f}", flush=True)


def main() -> None:
    of = machine()
    print(
        f"{of['cpu']}, {of['num_cores']} cores, torch {torch.__version__}, safetensors {safetensors.__version__}",
        flush=True,
    )
    torch.set_num_threads(1)  # what is left of the cores is the sleeper's
    tensors = {str(number): torch.ones(_NUM_WEIGHTS // _NUM_TENSORS) for number in range(_NUM_TENSORS)}
    objects = [[] for _ in range(_NUM_OBJECTS)]  # type: list[list[int]]
    body = msgspec.json.encode([{}] * 65_000)
    show("nothing", lambda: time.sleep(0.1))
    show("Python", count)
    show("Python, with Python's own switch interval", count, _PYTHONS_OWN_S)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tensors.safetensors"
        show("168 MB written by safetensors", lambda: save_file(tensors, path))
        show("168 MB read by safetensors", lambda: load(path.read_bytes()))
        show("168 MB read by read_tensors", lambda: read_tensors(path))
    show(f"garbage among {_NUM_OBJECTS:,} objects collected", gc.collect)
    show("65,000 objects of JSON decoded", lambda: msgspec.json.decode(body))
    del objects
    Freed(lambda: torch.empty(_NUM_WEIGHTS)).show("168 MB of torch's freed")
    Freed(lambda: host_tensor((_NUM_WEIGHTS,), torch.float32)).show("168 MB of host_tensor's freed")


if __name__ == "__main__":
    main()
