"""Capturing launched work as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def capture_graph(run: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """What ``run`` launches on the current stream, as a graph with its memory in ``pool``. It is run once before, which
    compiles what is not compiled yet.

    Not through torch.cuda.graph, which collects garbage each time: that takes longer than all the rest.
    """
    run()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    run()
    graph.capture_end()
    return graph
