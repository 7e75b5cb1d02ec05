"""Capturing launched work as a CUDA graph."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

import torch

from cotenant.device.cuda.driver import Driver


def current_lane() -> int:
    """The stream that work is launched on now. A graph keeps the SMs of the stream that it was captured on."""
    # As compiled code of torch and Triton asks for it: torch.cuda.current_stream counts the devices each time.
    return int(torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice()))


class LaneGraphs:
    """Pieces of work that are captured when they come again, on each lane for itself, with their memory in ``pool``.
    ``is_ready``: asked after each launch that was no graph's whether what was launched since it was asked last may be
    captured; so may all of that kind, then."""

    def __init__(self, pool: Any, is_ready: Callable[[], bool] = lambda: True) -> None:
        self._pool = pool
        self._is_ready = is_ready
        self._has_run: set[tuple[Hashable, int]] = set()
        self._graphs: dict[tuple[Hashable, int], torch.cuda.CUDAGraph] = {}

    def __len__(self) -> int:
        """Graphs that there are."""
        return len(self._graphs)

    def take_all(self) -> list[torch.cuda.CUDAGraph]:
        """All of them, which are the caller's then."""
        graphs = list(self._graphs.values())
        self._graphs.clear()
        return graphs

    def run(self, piece: Hashable, kind: Hashable, launch: Callable[[], None], *, may_capture: bool = True) -> None:
        """Launch a piece. Each kind of them runs as it is, once or until it is ready, before a piece of it is captured:
        that compiles its kernels and makes its libraries ready."""
        lane = current_lane()
        graph = self._graphs.get((piece, lane))
        if graph is None:
            if not may_capture or (kind, lane) not in self._has_run:
                launch()
                if self._is_ready():
                    self._has_run.add((kind, lane))
                return
            graph = self._graphs[piece, lane] = capture_graph(launch, self._pool, warm_up=False)
        graph.replay()


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
        _begin(graph, pool)
        try:
            run()
        except BaseException:
            with suppress(Exception):  # the stream must not be left capturing, whatever that says of the failed graph
                _end(graph, pool)
            raise
        _end(graph, pool)
    finally:
        if collects:
            gc.enable()
    return graph


def _begin(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    except Exception:
        if _end_allocation(pool):  # it came that far before it failed
            _leave(graph, pool)
        raise


def _end(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Take back, if it fails, what torch notes as a capture begins, and does not take back itself where CUDA has
    invalidated it: that a capture is under way, until whose end it frees nothing that other streams have used, and that
    the pool has a graph more, which would keep the pool's memory for good."""
    try:
        graph.capture_end()
    except Exception:
        _end_empty(graph)
        _end_allocation(pool)
        _leave(graph, pool)
        raise


def _end_empty(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture of nothing in place of the one that was invalidated. In some versions of torch ``capture_end``
    takes back nothing before it has a graph, and of the host's allocator only it can: the pool would take no capture
    again. In others it finds that all is taken back, and fails once more."""
    with suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the graph is empty
        driver, stream = Driver(), torch.cuda.current_stream().cuda_stream
        driver.call("cuStreamBeginCapture", stream, driver.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        graph.capture_end()


def _end_allocation(pool: Any) -> bool:
    """Whether torch's allocator was recording for the pool; it no longer is."""
    try:
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    except RuntimeError:
        return False
    return True


def _leave(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    # A graph that was captured takes itself out of the pool as it goes; after 2.13.0 every graph does
    # (pytorch/pytorch#190348). To do so twice would free the memory of the pool's other graphs.
    if torch.__version__ < (2, 13, 1) and not _is_captured(graph):  # type: ignore[operator]
        torch._C._cuda_releasePool(torch.cuda.current_device(), pool)


def _is_captured(graph: torch.cuda.CUDAGraph) -> bool:
    """Whether ``capture_end`` has got the graph, even if it could not make it ready to launch."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True
