"""How long the products of a decode step take on some of a GPU's SMs, cut in different ways: what
``cotenant.models.skinny_tiling`` was chosen by. For each shape and number of SMs the tiling that is chosen, with its
time, and the fastest that gives the same bits.

    python bench/skinny_tilings.py --rows 32 --sms 16,32,48,64,80 --json tilings.json

Needs an NVIDIA GPU with green contexts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cotenant.device.cuda.partitions import split_multiprocessors
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
# (columns, depth, warps, stages)
CUTS = (
    *itertools.product((32,), (128, 256), (4,), (5, 8)),
    *itertools.product((64,), (64, 128), (4, 8), (3, 4, 6, 8)),
    *itertools.product((128,), (64, 128), (4, 8), (2, 3, 4, 5)),
    *itertools.product((256,), (64,), (8,), (3, 4, 5)),
)
_COPY_BYTES = 600e6  # of the matrix, as several: more than the cache holds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--sms", default="16,32,48,64,80", help="besides all of them")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    made = split_multiprocessors(device, [int(part) for part in arguments.sms.split(",")])
    lanes: dict[int, torch.cuda.Stream] = {partition.online_sms: streams.online for partition, streams in made.items()}
    every = skinny._all_multiprocessors(device)
    lanes[every.total] = torch.cuda.Stream()
    rows = []
    for name, (num_out, num_in) in SHAPES.items():
        times = _measure(arguments.rows, num_out, num_in, lanes)
        for num_sms in lanes:
            chosen = choose_tiling(arguments.rows, num_out, num_in, every._replace(num=num_sms))
            assert chosen is not None
            by_time = sorted((found[num_sms], tiling) for tiling, found in times.items())
            best_us, best = by_time[0]
            print(
                f"{name:8} {num_sms:4} SMs  chosen {times[chosen][num_sms]:7.1f} us {tuple(chosen)}  "
                f"best {best_us:7.1f} us {tuple(best)}"
            )
        rows.append(
            {"shape": name, "rows": arguments.rows, "us": [[*tiling, found] for tiling, found in times.items()]}
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows) + "\n")


def _measure(
    num_rows: int, num_out: int, num_in: int, lanes: dict[int, torch.cuda.Stream]
) -> dict[Tiling, dict[int, float]]:
    """Microseconds by tiling and by SMs, of those that give the bits of the one that is chosen on all SMs."""
    every = skinny._all_multiprocessors(torch.device("cuda", torch.cuda.current_device()))
    whole = choose_tiling(num_rows, num_out, num_in, every)
    assert whole is not None
    candidates = {choose_tiling(num_rows, num_out, num_in, every._replace(num=num_sms)) for num_sms in lanes}
    candidates |= {Tiling(whole.rows, columns, depth, whole.splits, *rest) for columns, depth, *rest in CUTS}
    count = max(2, min(12, int(_COPY_BYTES / (num_out * num_in * 2))))
    weights = [torch.randn(num_out, num_in, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(count)]
    x = torch.randn(num_rows, num_in, device="cuda", dtype=torch.bfloat16)
    dtype = torch.bfloat16 if whole.splits == 1 else torch.float32
    out = torch.empty((whole.splits, num_rows, num_out), dtype=dtype, device="cuda")
    skinny._launch(x, weights[0], None, out, whole, None)
    expected = out.clone()
    found: dict[Tiling, dict[int, float]] = {}
    for tiling in candidates:
        if tiling is None or num_out % tiling.columns or num_in % (tiling.splits * tiling.depth):
            continue
        if tiling.num_stages * tiling.stage_bytes > every.shared_bytes:
            continue

        def launch(weight: torch.Tensor, tiling: Tiling = tiling) -> None:
            skinny._launch(x, weight, None, out, tiling, None)

        launch(weights[0])
        if torch.equal(out, expected):
            found[tiling] = {num_sms: _time_us(launch, weights, stream) for num_sms, stream in lanes.items()}
    return found


def _time_us(launch: Callable[[Any], None], weights: list[torch.Tensor], stream: torch.cuda.Stream) -> float:
    """The median of three replays of a graph, for each launch in it."""
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for weight in (*weights, *weights):
                launch(weight)
        graph.replay()
        times_ms = []
        for _ in range(3):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            graph.replay()
            end.record(stream)
            stream.synchronize()
            times_ms.append(begin.elapsed_time(end))
    return round(statistics.median(times_ms) * 1e3 / (2 * len(weights)), 2)


if __name__ == "__main__":
    main()
