"""How long a captured graph takes."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch

K = TypeVar("K", bound=Hashable)


def replayed_us(graph: torch.cuda.CUDAGraph) -> float:
    """On the current stream, behind another replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def medians_us(graphs: Mapping[K, torch.cuda.CUDAGraph], num_rounds: int) -> dict[K, float]:
    """Over rounds in which all take turns, so that clocks are alike."""
    times_us: dict[K, list[float]] = {key: [] for key in graphs}
    for _ in range(num_rounds):
        for key, graph in graphs.items():
            times_us[key].append(replayed_us(graph))
    return {key: statistics.median(found) for key, found in times_us.items()}
