"""Training's matrix products on a part of the SMs: by the algorithm that torch's library takes, by what that takes when
it is told of the SMs, and by the fastest of its algorithms. Then a layer's products one after the other for a while,
alone and beside something that reads memory on the other SMs, at whatever clocks the board's power leaves.

    python bench/lane_products.py --sms 100,84,68
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from replays import medians_us
from skinny_tilings import SHAPES

from cotenant.device.cuda.cublaslt import Operands, Product
from cotenant.device.cuda.graphs import capture_graph
from cotenant.device.cuda.partitions import PartitionStreams, split_multiprocessors

# Output features, input features, whether the matrix is transposed.
_LAYER = {name: shape for name, shape in SHAPES.items() if name != "head"}
PRODUCTS = {name: (*shape, True) for name, shape in _LAYER.items()}
PRODUCTS |= {f"back through {name}": (*reversed(shape), False) for name, shape in _LAYER.items()}
_READ_BYTES = 4 << 30
_MOST_IN_FLIGHT = 2
_IN_A_GRAPH = 4


class Case:
    """One product on so many SMs, launched each way."""

    def __init__(self, num_rows: int, num_out: int, num_in: int, is_transposed: bool, num_sms: int) -> None:
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.x = torch.randn(num_rows, num_in, **options)
        matrix = torch.randn(num_out, num_in, **options) if is_transposed else torch.randn(num_in, num_out, **options)
        self.matrix = (matrix * 0.02).T if is_transposed else matrix * 0.02
        self.out = torch.zeros(num_rows, num_out, **options)
        operands = Operands.of(self.out, self.x, self.matrix)
        assert operands is not None
        self.product = Product(operands, num_sms, self.x.device)
        self.flop = 2 * num_rows * num_out * num_in

    def by_torch(self) -> None:
        self.out.addmm_(self.x, self.matrix)

    def by(self, algorithm: int) -> Callable[[], None]:
        return lambda: self.product.add(algorithm, self.out, self.x, self.matrix)

    def result(self, run: Callable[[], None]) -> torch.Tensor:
        torch.manual_seed(0)
        self.out.copy_(torch.randn_like(self.out))
        run()
        found = self.out.clone()
        self.out.zero_()
        return found


def told(num_sms: int) -> None:
    """torch's library, of the SMs that there are; 0: all."""
    major = (torch.version.cuda or "").split(".")[0]
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    ctypes.CDLL(f"libcublas.so.{major}").cublasSetSmCountTarget(handle, ctypes.c_int(num_sms))


def several(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """``_IN_A_GRAPH`` of them."""

    def launch() -> None:
        for _ in range(_IN_A_GRAPH):
            run()

    return capture_graph(launch, torch.cuda.graph_pool_handle())


def compare(name: str, case: Case, num_sms: int) -> dict[str, Callable[[], None]]:
    """Prints a row; what launches the product by torch's choice, and by the fastest."""
    expected, same, launches_ms = case.result(case.by_torch), {}, []
    for index in range(len(case.product.algorithms)):
        torch.cuda.synchronize()
        start = time.perf_counter()
        case.by(index)()
        launches_ms.append((time.perf_counter() - start) * 1e3)
        same[str(index)] = torch.equal(expected, case.result(case.by(index)))
    graphs = {"torch": several(case.by_torch)}
    told(num_sms)
    graphs["told"] = several(case.by_torch)
    told(0)
    graphs |= {index: several(case.by(int(index))) for index in same}
    medians = medians_us(graphs, 5)
    best = min(same, key=lambda index: medians[index])
    medians = medians_us({each: graphs[each] for each in ("torch", "told", best)}, 15)
    each_us = [us / _IN_A_GRAPH for us in medians.values()]
    cells = [f"{us:.0f} ({case.flop / us / 1e6:.0f})" for us in each_us]
    bits = f"{sum(same.values())} of {len(same)}{'' if same[best] else ', NOT THE FASTEST'}"
    print("|", " | ".join((str(num_sms), name, *cells, bits, f"{max(launches_ms):.1f}")), "|", flush=True)
    return {"torch": case.by_torch, "fastest": case.by(int(best))}


def keep_busy(
    layer: torch.cuda.CUDAGraph,
    stream: torch.cuda.Stream,
    reads: torch.cuda.CUDAGraph | None,
    others: torch.cuda.Stream | None,
    seconds: float,
) -> tuple[float, float]:
    """Layers' products a second, and TB/s read meanwhile on the other SMs."""
    lanes = [(layer, stream, deque[torch.cuda.Event]())]
    if reads is not None and others is not None:
        lanes.append((reads, others, deque()))
    ended = [0] * len(lanes)
    torch.cuda.synchronize()
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        for place, (graph, lane, in_flight) in enumerate(lanes):
            while in_flight and in_flight[0].query():
                in_flight.popleft()
                ended[place] += 1
            if len(in_flight) < _MOST_IN_FLIGHT:
                with torch.cuda.stream(lane):
                    graph.replay()
                    in_flight.append(torch.cuda.Event())
                    in_flight[-1].record()
        time.sleep(5e-5)
    torch.cuda.synchronize()
    return ended[0] / elapsed, sum(ended[1:]) * _READ_BYTES / elapsed / 1e12


def sustain(runs: list[dict[str, Callable[[], None]]], num_sms: int, streams: PartitionStreams, seconds: float) -> None:
    memory = torch.empty(_READ_BYTES // 4, device="cuda")
    layers = {}
    with torch.cuda.stream(streams.best_effort):
        for way in ("torch", "fastest"):
            layers[way] = capture_graph(lambda: [each[way]() for each in runs], torch.cuda.graph_pool_handle())  # type: ignore[arg-type, return-value]  # noqa: B023
    with torch.cuda.stream(streams.online):
        reads = capture_graph(lambda: memory.sum(), torch.cuda.graph_pool_handle())  # type: ignore[arg-type, return-value]
    for beside in (None, reads):
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in layers}
        for _ in range(3):
            for way, layer in layers.items():
                found[way].append(keep_busy(layer, streams.best_effort, beside, streams.online, seconds))
        rates = {way: statistics.median(rate for rate, _ in values) for way, values in found.items()}
        read = {way: statistics.median(rate for _, rate in values) for way, values in found.items()}
        what = "alone" if beside is None else "beside reads"
        gain, by_way = rates["fastest"] / rates["torch"], [f"{rates[way]:.1f}, {read[way]:.2f}" for way in layers]
        print("|", " | ".join((str(num_sms), what, *by_way, f"{gain:.3f}")), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sms", default="100,84,68", help="that training has, of all")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=0.7, help="for each way, three times")
    arguments = parser.parse_args()
    device, counts = torch.device("cuda", 0), list(map(int, arguments.sms.split(",")))
    every = torch.cuda.get_device_properties(device).multi_processor_count
    partitions = split_multiprocessors(device, [every - count for count in counts])
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}; {arguments.rows} rows, bfloat16\n")
    print("us (TFLOP/s) by torch, by torch told of the SMs, by the fastest of the library's algorithms; how many of")
    print("those have torch's bits, and how long the host took to launch one for the first time, ms.\n")
    print("| SMs | product | torch | told | fastest | same bits | first launch |\n|---|---|---|---|---|---|---|")
    found = []
    for partition, streams in partitions.items():
        with torch.cuda.stream(streams.best_effort):
            runs = [
                compare(name, Case(arguments.rows, *shape, partition.best_effort_sms), partition.best_effort_sms)
                for name, shape in PRODUCTS.items()
            ]
        found.append((runs, partition.best_effort_sms, streams))
    print("\nLayers' products a second, and TB/s read on the other SMs.\n")
    print("| SMs | | torch | fastest | times |\n|---|---|---|---|---|")
    for each in found:
        sustain(*each, arguments.seconds)


if __name__ == "__main__":
    main()
