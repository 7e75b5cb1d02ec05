"""What the matrix products of a decode step cost in energy, and how much of that is to bring the matrices in: on all
of a GPU's SMs, and on a part of them. Beside it what the same products cost a token that is trained.

Where the board's power limit holds the clocks down, requests and training share joules: what a decode step takes of
those that the limit allows until the next token is what training cannot have.

    python bench/read_energy.py

Needs an NVIDIA GPU with green contexts, whose energy NVML counts, and nvidia-ml-py.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pynvml
import torch
import triton
import triton.language as tl
from skinny_tilings import SHAPES

from cotenant.device.cuda.partitions import split_multiprocessors
from cotenant.models.compressed import compress
from cotenant.models.fused_linear import FusedLinear
from cotenant.models.kernels import skinny
from cotenant.models.skinny_tiling import sms_at_hand

# (out, in) of a layer of Llama-3.1-8B, and how many there are.
_LAYER = [shape for name, shape in SHAPES.items() if name != "head"]
NUM_LAYERS = 32
_TRAINED_ROWS = 2048
_WARM_S = 0.4
_PER_PROGRAM, _WIDTH = 16384, 2048  # words of four bytes, read so many at a time


class Reading(NamedTuple):
    """Of each run: milliseconds and joules."""

    run_ms: float
    joules: float

    @property
    def watts(self) -> float:
        return self.joules / self.run_ms * 1e3


@triton.jit
def _read_kernel(words, found, PER_PROGRAM: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    kept = tl.zeros((WIDTH,), tl.int32)
    for start in range(0, PER_PROGRAM, WIDTH):
        offsets = program.to(tl.int64) * PER_PROGRAM + start + tl.arange(0, WIDTH)
        kept = kept ^ tl.load(words + offsets, eviction_policy="evict_first")
    tl.store(found + program * WIDTH + tl.arange(0, WIDTH), kept, mask=kept == 0x7FFFFFFF)  # hardly ever


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32, help="sequences that decode")
    parser.add_argument("--sms", type=int, default=48, help="besides all of them")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each is measured")
    arguments = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    made = split_multiprocessors(device, [arguments.sms])
    lanes = {partition.online_sms: streams.online for partition, streams in made.items()}
    lanes[torch.cuda.get_device_properties(device).multi_processor_count] = torch.cuda.Stream()
    layers = random_layers()
    plain = [[FusedLinear((), (), weight) for weight in layer] for layer in layers]
    compressed = [[FusedLinear((), (), weight, None, compress(weight)) for weight in layer] for layer in layers]
    num_bytes = sum(weight.numel() * weight.element_size() for layer in layers for weight in layer)
    meter = Meter(device, arguments.seconds)
    idle = meter.measure(lambda: torch.cuda._sleep(2_000_000), torch.cuda.Stream())
    print(f"{torch.cuda.get_device_name(device)}: {num_bytes / 1e9:.2f} GB of matrices, {NUM_LAYERS} layers")
    print(f"{'one thread that waits':32} {idle.watts:6.0f} W")
    for num_sms, stream in sorted(lanes.items()):
        for name, launch in (
            ("read", lambda: _read(layers)),
            (f"products of {arguments.rows} rows", lambda: decode_products(plain, arguments.rows)),
            ("the same, compressed", lambda: decode_products(compressed, arguments.rows)),
        ):
            with sms_at_hand(num_sms):
                found = meter.measure(launch, stream)
            above = found.joules - idle.watts * found.run_ms / 1e3
            print(
                f"{name + f' on {num_sms} SMs':32} {found.watts:6.0f} W {found.run_ms:7.2f} ms {found.joules:6.2f} J, "
                f"{above:5.2f} J above waiting: {above / num_bytes / 8 * 1e12:5.1f} pJ a bit"
            )
    found = meter.measure(lambda: _train(layers), lanes[max(lanes)])
    each = found.joules / _TRAINED_ROWS
    print(
        f"{f'products of {_TRAINED_ROWS} rows':32} {found.watts:6.0f} W {found.run_ms:7.2f} ms {found.joules:6.2f} J, "
        f"{each * 1e3:.1f} mJ a token; forward and backward to the input about twice that"
    )


def random_layers() -> list[list[torch.Tensor]]:
    """A model's weights."""
    return [
        [torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02 for shape in _LAYER] for _ in range(NUM_LAYERS)
    ]


class Meter:
    """Runs something for a while and reads the board's energy before and after."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        pynvml.nvmlInit()
        self._handle: Any = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        self._seconds = seconds

    def measure(self, launch: Callable[[], None], stream: torch.cuda.Stream) -> Reading:
        with torch.cuda.stream(stream):
            launch()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                launch()
            once_s = self._run(graph, 2)[0]
            self._run(graph, max(2, int(_WARM_S / once_s)))
            run_s, joules = self._run(graph, max(2, int(self._seconds / once_s)))
        return Reading(run_s * 1e3, joules)

    def _run(self, graph: torch.cuda.CUDAGraph, count: int) -> tuple[float, float]:
        torch.cuda.synchronize()
        start_s, before_mj = time.perf_counter(), pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        for _ in range(count):
            graph.replay()
        torch.cuda.synchronize()
        after_mj = pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        return (time.perf_counter() - start_s) / count, (after_mj - before_mj) / 1e3 / count


def _read(layers: list[list[torch.Tensor]]) -> None:
    for weight in itertools.chain.from_iterable(layers):
        words = weight.view(torch.int32)
        num_programs = words.numel() // _PER_PROGRAM
        found = torch.empty((num_programs, _WIDTH), dtype=torch.int32, device=weight.device)
        _read_kernel[(num_programs,)](words, found, PER_PROGRAM=_PER_PROGRAM, WIDTH=_WIDTH, num_warps=8)


def decode_products(layers: list[list[FusedLinear]], num_rows: int) -> None:
    """Of a step of so many sequences."""
    for base in itertools.chain.from_iterable(layers):
        skinny.unfinished_product(_inputs(num_rows, base.weight.shape[1]), base, None)


def _train(layers: list[list[torch.Tensor]]) -> None:
    for weight in itertools.chain.from_iterable(layers):
        torch.nn.functional.linear(_inputs(_TRAINED_ROWS, weight.shape[1]), weight)


@cache
def _inputs(num_rows: int, width: int) -> torch.Tensor:
    return torch.randn((num_rows, width), dtype=torch.bfloat16, device="cuda")


if __name__ == "__main__":
    main()
