"""How long the products of a decode step take on some of a GPU's SMs, beside training's products on the others, and on
all of them alone, cut in different ways: what ``cotenant.models.skinny_tiling`` was chosen by. For each shape and
number of SMs the tiling that is chosen, with its time, and the fastest that give the same bits, by TMA and by copies of
the threads' own.

    python bench/skinny_tilings.py --rows 32 --sms 16,32,48,64,80 --json tilings.json

Needs an NVIDIA GPU with green contexts, of Hopper or later.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from replays import replayed_us
from triton.runtime.errors import OutOfResources

from cotenant.device.cuda.graphs import capture_graph
from cotenant.device.cuda.partitions import PartitionStreams, split_multiprocessors
from cotenant.models.kernels import skinny
from cotenant.models.skinny_tiling import Tiling, choose_tiling

# (out, in) of Llama-3.1-8B.
SHAPES = {
    "qkv": (6144, 4096),
    "output": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
# (columns, depth, warps, stages, whether by TMA)
CUTS = (
    *itertools.product((32,), (256,), (4,), (5,), (True,)),
    *itertools.product((64,), (64,), (4,), (4, 6, 8, 10), (True,)),
    *itertools.product((64,), (128,), (4,), (3, 4, 5, 6), (True, False)),
    *itertools.product((128,), (64,), (4,), (3, 4, 5, 6), (True, False)),
    *itertools.product((128,), (128,), (4,), (2, 3, 4, 5), (True,)),
)
_COPY_BYTES = 600e6  # of the matrix, as several: more than the cache holds
_TRAINED = 2048  # tokens
_IN_FLIGHT = 4
_NUM_ROUNDS = 5


class Lane:
    """A stream on all SMs, or that of a partition, on whose other SMs training's products run all the time."""

    def __init__(self, streams: PartitionStreams | None) -> None:
        self.stream = torch.cuda.Stream() if streams is None else streams.online
        self._training = None if streams is None else _Training(streams.best_effort)

    def time_us(self, launches: Mapping[Tiling, Callable[[], None]]) -> dict[Tiling, float]:
        """The median of each, all of which take turns."""
        with torch.cuda.stream(self.stream):
            pool = torch.cuda.graph_pool_handle()
            graphs = {tiling: capture_graph(launch, pool) for tiling, launch in launches.items()}
        found: dict[Tiling, list[float]] = {tiling: [] for tiling in graphs}
        for _ in range(_NUM_ROUNDS):
            for tiling, graph in graphs.items():
                if self._training is not None:
                    self._training.go_on()
                with torch.cuda.stream(self.stream):
                    found[tiling].append(replayed_us(graph))
        torch.cuda.synchronize()
        return {tiling: statistics.median(times_us) for tiling, times_us in found.items()}


class _Training:
    """The products of a few layers, forwards, again and again."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._in_flight: deque[torch.cuda.Event] = deque()
        shapes = [shape for name, shape in SHAPES.items() if name != "head"]
        self._weights = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02 for shape in shapes * 4]
        self._inputs = {width: torch.randn(_TRAINED, width, device="cuda", dtype=torch.bfloat16) for _, width in shapes}
        with torch.cuda.stream(stream):
            self._launch()
            torch.cuda.synchronize()
            self._graph = capture_graph(self._launch, torch.cuda.graph_pool_handle())

    def _launch(self) -> None:
        for weight in self._weights:
            torch.nn.functional.linear(self._inputs[weight.shape[1]], weight)

    def go_on(self) -> None:
        """Some are in flight from now on."""
        while self._in_flight and self._in_flight[0].query():
            self._in_flight.popleft()
        with torch.cuda.stream(self._stream):
            while len(self._in_flight) < _IN_FLIGHT:
                self._graph.replay()
                self._in_flight.append(torch.cuda.Event())
                self._in_flight[-1].record()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--sms", default="16,32,48,64,80", help="besides all of them")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    made = split_multiprocessors(device, [int(part) for part in arguments.sms.split(",")])
    lanes = {partition.online_sms: Lane(streams) for partition, streams in made.items()}
    every = skinny._all_multiprocessors(device)
    lanes[every.total] = Lane(None)
    rows = []
    for name, (num_out, num_in) in SHAPES.items():
        times = _measure(arguments.rows, num_out, num_in, lanes)
        for num_sms in lanes:
            chosen = choose_tiling(arguments.rows, num_out, num_in, every._replace(num=num_sms))
            assert chosen is not None
            cells = [f"{name:8} {num_sms:4} SMs  chosen {_said(chosen, times[chosen][num_sms])}"]
            for title, by_tma in (("by TMA", True), ("by threads", False)):
                found = {tiling: each[num_sms] for tiling, each in times.items() if tiling.by_tma is by_tma}
                best = min(found, key=found.__getitem__)
                cells.append(f"{title} {_said(best, found[best])}")
            print("   ".join(cells))
        rows.append(
            {"shape": name, "rows": arguments.rows, "us": [[*tiling, found] for tiling, found in times.items()]}
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows) + "\n")


def _said(tiling: Tiling, time_us: float) -> str:
    return f"{time_us:6.1f} us ({tiling.columns} x {tiling.depth}, {tiling.num_stages} stages)"


def _measure(num_rows: int, num_out: int, num_in: int, lanes: dict[int, Lane]) -> dict[Tiling, dict[int, float]]:
    """Microseconds by tiling and by SMs, of those that give the bits of the one that is chosen on all SMs."""
    every = skinny._all_multiprocessors(torch.device("cuda", torch.cuda.current_device()))
    whole = choose_tiling(num_rows, num_out, num_in, every)
    assert whole is not None
    candidates = {choose_tiling(num_rows, num_out, num_in, every._replace(num=num_sms)) for num_sms in lanes}
    candidates |= {
        Tiling(whole.rows, columns, depth, whole.splits, num_warps, num_stages, by_tma)
        for columns, depth, num_warps, num_stages, by_tma in CUTS
    }
    count = max(2, min(12, int(_COPY_BYTES / (num_out * num_in * 2))))
    weights = [torch.randn(num_out, num_in, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(count)]
    x = torch.randn(num_rows, num_in, device="cuda", dtype=torch.bfloat16)
    dtype = torch.bfloat16 if whole.splits == 1 else torch.float32
    out = torch.empty((whole.splits, num_rows, num_out), dtype=dtype, device="cuda")
    skinny._launch(x, weights[0], None, out, whole, None)
    expected = out.clone()
    launches: dict[Tiling, Callable[[], None]] = {}
    for tiling in candidates:
        if tiling is None or num_out % tiling.columns or num_in % (tiling.splits * tiling.depth):
            continue

        def launch(tiling: Tiling = tiling) -> None:
            for weight in (*weights, *weights):
                skinny._launch(x, weight, None, out, tiling, None)

        try:
            skinny._launch(x, weights[0], None, out.zero_(), tiling, None)
        except OutOfResources:
            continue
        if torch.equal(out, expected):
            launches[tiling] = launch
        else:
            print(f"{tuple(tiling)} gives other bits")
    times = {num_sms: lane.time_us(launches) for num_sms, lane in lanes.items()}
    each = 2 * len(weights)
    return {
        tiling: {num_sms: round(found[tiling] / each, 2) for num_sms, found in times.items()} for tiling in launches
    }


if __name__ == "__main__":
    main()
