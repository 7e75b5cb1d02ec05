"""What keeps launches waiting: a thread launches kernels, small ones and such as keep a GPU busy; another one copies
tensors between host and device, pins memory, or reads and writes files of tensors.

    python bench/held_up.py

For each: how long it takes, and the launches' longest time. The device is kept busy by kernels of some milliseconds on
a stream of their own, in whose order what is copied to the host is copied, as a checkpoint is in training's. Last, how
long the thread that launches takes to let go of captured graphs.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load, save_file

from cotenant.device.cuda.graphs import capture_graph
from cotenant.device.transfer import pinned, to_device, to_host
from cotenant.models.tensors_in_memory import read_tensors
from cotenant.runtime.worker_process import SWITCH_S

# As much as an adapter of rank 16 has for all linear layers of an 8B model, one tensor of three in a checkpoint.
_NUM_WEIGHTS = 42_000_000
_NUM_GRAPHS, _KERNELS_OF_GRAPH = 2000, 8
_BUSY_ROWS, _MOST_BUSY = 8192, 4  # a product of some 10 ms each in float32
_EVERY_S = 1e-4


class Busy:
    """A stream that has some kernels to run at any time."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self._a, self._b = (torch.randn(_BUSY_ROWS, _BUSY_ROWS, device="cuda") for _ in range(2))
        self._out = torch.empty_like(self._a)
        self._ends: list[torch.cuda.Event] = []

    def top_up(self) -> None:
        """Call from the thread that launches."""
        self._ends = [end for end in self._ends if not end.query()]
        with torch.cuda.stream(self.stream):
            while len(self._ends) < _MOST_BUSY:
                torch.mm(self._a, self._b, out=self._out)
                self._ends.append(torch.cuda.Event())
                self._ends[-1].record()

    def noted(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self.stream)
        return event


def show(name: str, busy: Busy, run: Callable[[], object]) -> None:
    tensor, event = torch.zeros(1024, device="cuda"), torch.cuda.Event()
    took_s, took_ms = [0.0], []

    def timed() -> None:
        begin_s = time.perf_counter()
        run()
        took_s[0] = time.perf_counter() - begin_s

    thread = threading.Thread(target=timed)
    with torch.cuda.stream(torch.cuda.Stream(priority=-1)):
        busy.top_up()
        tensor.add_(1)
        thread.start()
        while thread.is_alive():
            begin_s = time.perf_counter()
            tensor.add_(1)
            event.record()
            event.query()
            busy.top_up()
            took_ms.append((time.perf_counter() - begin_s) * 1e3)
            time.sleep(_EVERY_S)
    thread.join()
    took_ms.sort()
    longest = ", ".join(f"{ms:.2f}" for ms in took_ms[-3:])
    print(f"{name:54s} took {took_s[0] * 1e3:7.1f} ms; launches of {len(took_ms)}: longest {longest} ms", flush=True)


def main() -> None:
    versions = f"torch {torch.__version__}, safetensors {safetensors.__version__}"
    print(f"{torch.cuda.get_device_name()}, {versions}", flush=True)
    sys.setswitchinterval(SWITCH_S)  # as in the worker
    busy = Busy()
    weights = torch.ones(_NUM_WEIGHTS, device="cuda")
    on_host = {str(number): torch.ones(_NUM_WEIGHTS // 1000) for number in range(1000)}
    half = torch.ones(_NUM_WEIGHTS, dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    to_host(weights[:1])  # its pinned memory

    def copy_as_torch_does(begins: torch.cuda.Event) -> torch.Tensor:
        with torch.cuda.stream(stream):
            stream.wait_event(begins)
            return weights.to("cpu")

    def bring_as_torch_does() -> list[torch.Tensor]:
        with torch.cuda.stream(stream):
            return [tensor.to("cuda") for tensor in on_host.values()]

    show("nothing", busy, lambda: time.sleep(0.2))
    for _ in range(2):
        busy.top_up()
        begins = busy.noted()
        show("168 MB to the host, as torch copies", busy, lambda begins=begins: copy_as_torch_does(begins))  # type: ignore[misc]
        busy.top_up()
        begins = busy.noted()
        show("168 MB to the host, by to_host", busy, lambda begins=begins: to_host(weights, begins))  # type: ignore[misc]
    show("1000 tensors of 168 MB to the device, as torch copies", busy, bring_as_torch_does)
    show("1000 tensors of 168 MB to the device, by to_device", busy, lambda: to_device(on_host, weights.device))
    kept = []
    show("84 MB pinned at once", busy, lambda: kept.append(half.pin_memory()))
    show("84 MB pinned at once again", busy, lambda: kept.append(half.pin_memory()))
    show("84 MB pinned in parts", busy, lambda: kept.append(pinned(half)))  # type: ignore[arg-type]
    show("84 MB pinned in parts again", busy, lambda: kept.append(pinned(half)))  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tensors.safetensors"
        show("168 MB written by safetensors", busy, lambda: save_file(on_host, path))
        show("168 MB read by safetensors", busy, lambda: load(path.read_bytes()))
        show("168 MB read by read_tensors", busy, lambda: read_tensors(path))
    show_graphs()


def show_graphs() -> None:
    """On the thread that launches: how long it takes to let go of them."""
    pool, graphs = torch.cuda.graph_pool_handle(), []
    matrix = torch.zeros(128, 128, device="cuda")

    def launch() -> None:
        product = matrix
        for _ in range(_KERNELS_OF_GRAPH):
            product = product @ matrix

    with torch.cuda.stream(torch.cuda.Stream()):
        launch()
        for _ in range(_NUM_GRAPHS):
            graphs.append(capture_graph(launch, pool, warm_up=False))
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    graphs.clear()
    cleared_s = time.perf_counter()
    torch.cuda.empty_cache()
    emptied_s = time.perf_counter()
    print(f"{_NUM_GRAPHS} graphs of {_KERNELS_OF_GRAPH} kernels destroyed in {(cleared_s - begin_s) * 1e3:.1f} ms")
    print(f"their memory given back, with what else is unused, in {(emptied_s - cleared_s) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
