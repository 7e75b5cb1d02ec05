"""What a decode step's matrix products would save if they were fused into those of a training forward: the most that
the mode "fused" can gain over running the two one after the other.

For each number of training rows and of sequences that decode, microseconds of a layer's four products: of the decode
step alone (as it is served), of the forward alone, and of both in one product each. ``saved_us``: what fusing saves of
the sum; where it is negative the rows together leave the tile grid of the library's kernels, and fusing costs time.

    python bench/fused_products.py --train-rows 480,512,992,1024,1984,2016,2048 --decode-rows 8,32,64

Needs an NVIDIA GPU. Adapters, attention and what lies between the products are the same either way and left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import torch
from skinny_tilings import SHAPES

from cotenant.device.cuda.graphs import capture_graph
from cotenant.models.products import product

_NAMES = ("qkv", "output", "gate_up", "down")
_NUM_LAYERS = 4  # in turn: more than the cache holds
_NUM_TIMES = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train-rows", default="480,512,992,1024,1984,2016,2048")
    parser.add_argument("--decode-rows", default="8,32,64")
    arguments = parser.parse_args()
    trains, decodes = (
        [int(part) for part in text.split(",")] for text in (arguments.train_rows, arguments.decode_rows)
    )
    layers = [
        [torch.randn(SHAPES[name], device="cuda", dtype=torch.bfloat16) / SHAPES[name][1] ** 0.5 for name in _NAMES]
        for _ in range(_NUM_LAYERS)
    ]
    sizes = sorted({*trains, *decodes, *(train + decode for train in trains for decode in decodes)})
    alone_us = _layer_us(layers, sizes)
    for train in trains:
        for decode in decodes:
            apart_us = alone_us[train] + alone_us[decode]
            figures = {
                "train_rows": train,
                "decode_rows": decode,
                "train_us": round(alone_us[train], 1),
                "decode_us": round(alone_us[decode], 1),
                "fused_us": round(alone_us[train + decode], 1),
                "saved_us": round(apart_us - alone_us[train + decode], 1),
            }
            print(json.dumps(figures), flush=True)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


@torch.no_grad()
def _layer_us(layers: list[list[torch.Tensor]], sizes: list[int]) -> dict[int, float]:
    """By rows, a layer's products: medians over rounds in which all sizes take turns, so that clocks are alike."""
    graphs = {size: _captured(layers, size) for size in sizes}
    times_us: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(_NUM_TIMES):
        for size, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times_us[size].append(start.elapsed_time(end) * 1e3 / len(layers))
    return {size: statistics.median(found) for size, found in times_us.items()}


def _captured(layers: list[list[torch.Tensor]], rows: int) -> torch.cuda.CUDAGraph:
    inputs = {width: torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _, width in SHAPES.values()}

    def run() -> None:
        for weight in (weight for layer in layers for weight in layer):
            product(inputs[weight.shape[1]], weight)

    return _on_a_stream(lambda: capture_graph(run, None))


def _on_a_stream(capture: Callable[[], torch.cuda.CUDAGraph]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        return capture()


if __name__ == "__main__":
    main()
