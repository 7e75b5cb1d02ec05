"""What a decode step's matrix products would save if they were fused into those of a training forward: the most that
the mode "fused" can gain over running the two one after the other.

For each number of training rows and of sequences that decode, microseconds of a layer's four products: of the decode
step alone (as it is served), of the forward alone, and of both in one product each. ``saved_us``: what fusing saves of
the sum; little where the rows together leave the tile grid of the library's kernels.

    python bench/fused_products.py --train-rows 480,512,992,1024,1984,2016,2048 --decode-rows 8,32,64 [--seconds 1]

These are moments, at the clocks that a cool board has. With ``--seconds`` both ways then run for so long each, in turn
and twice: ``apart_us`` and ``together_us``, at the clocks that the board's power leaves them. Needs an NVIDIA GPU.
Adapters, attention and what lies between the products are the same either way and left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence

import torch
from replays import medians_us
from skinny_tilings import SHAPES

from cotenant.device.cuda.graphs import capture_graph
from cotenant.models.products import product

_NAMES = ("qkv", "output", "gate_up", "down")
_NUM_LAYERS = 4  # in turn: more than the cache holds
_NUM_TIMES = 15

Graphs = dict[int, torch.cuda.CUDAGraph]
"""By rows: the products of some layers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train-rows", default="480,512,992,1024,1984,2016,2048")
    parser.add_argument("--decode-rows", default="8,32,64")
    parser.add_argument("--seconds", type=float, default=0.0)
    arguments = parser.parse_args()
    trains, decodes = (
        [int(part) for part in text.split(",")] for text in (arguments.train_rows, arguments.decode_rows)
    )
    sizes = sorted({*trains, *decodes, *(train + decode for train in trains for decode in decodes)})
    weights = [_random(*SHAPES[name]) for _ in range(_NUM_LAYERS) for name in _NAMES]
    inputs = {(rows, width): _random(rows, width) for rows in sizes for _, width in SHAPES.values()}
    graphs = _captured(sizes, weights, inputs)  # which hold addresses, not tensors: both stay until the end
    alone_us = _moments_us(graphs)
    for train in trains:
        for decode in decodes:
            found = {"train_us": alone_us[train], "decode_us": alone_us[decode], "fused_us": alone_us[train + decode]}
            found["saved_us"] = found["train_us"] + found["decode_us"] - found["fused_us"]
            if arguments.seconds > 0:
                ways = {"apart_us": (train, decode), "together_us": (train + decode,)}
                times = [(name, _lasting_us(graphs, sizes, arguments.seconds)) for name, sizes in [*ways.items()] * 2]
                found |= {name: statistics.mean(us for each, us in times if each == name) for name in ways}
            figures = {name: round(us, 1) for name, us in found.items()}
            print(json.dumps({"train_rows": train, "decode_rows": decode, **figures}), flush=True)


def _random(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) / columns**0.5


@torch.no_grad()
def _captured(
    sizes: Sequence[int], weights: Sequence[torch.Tensor], inputs: Mapping[tuple[int, int], torch.Tensor]
) -> Graphs:
    def run(rows: int) -> None:
        for weight in weights:
            product(inputs[rows, weight.shape[1]], weight)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graphs = {rows: capture_graph(lambda rows=rows: run(rows), None) for rows in sizes}
    stream.synchronize()
    return graphs


def _moments_us(graphs: Graphs) -> dict[int, float]:
    return {size: us / _NUM_LAYERS for size, us in medians_us(graphs, _NUM_TIMES).items()}


def _lasting_us(graphs: Graphs, sizes: Sequence[int], seconds: float) -> float:
    """Of these one after the other, again and again: the mean of the second half."""
    ends: list[torch.cuda.Event] = []
    over_s = time.perf_counter() + seconds
    while time.perf_counter() < over_s or len(ends) < 4:
        if len(ends) >= 4:
            ends[-4].synchronize()  # some lie ahead
        for size in sizes:
            graphs[size].replay()
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        ends.append(end)
    torch.cuda.synchronize()
    half = ends[len(ends) // 2 :]
    return half[0].elapsed_time(half[-1]) * 1e3 / (len(half) - 1) / _NUM_LAYERS


if __name__ == "__main__":
    main()
