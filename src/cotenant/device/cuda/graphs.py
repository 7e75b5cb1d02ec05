"""Capturing launched work as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch


def capture_graph(run: Callable[[], None], pool: Any, *, warm_up: bool = True) -> torch.cuda.CUDAGraph:
    """What ``run`` launches on the current stream, as a graph with its memory in ``pool``. ``warm_up``: it is run
    once before, which compiles what is not compiled yet.

    Not through torch.cuda.graph, which collects garbage each time: that takes longer than all the rest. No garbage is
    collected meanwhile either: the driver refuses to let go of a graph or of memory while another is captured.
    """
    if warm_up:
        run()
    with suppress(torch.OutOfMemoryError):
        return _capture(run, pool)
    # torch gives nothing back while a graph is captured, and a capture runs nothing. What the attempt held is free now.
    torch.cuda.empty_cache()
    return _capture(run, pool)


def _capture(run: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            run()
        except BaseException:
            with suppress(Exception):  # the stream must not be left capturing, whatever that says of the failed graph
                graph.capture_end()
            raise
        graph.capture_end()
    finally:
        if collects:
            gc.enable()
    return graph
