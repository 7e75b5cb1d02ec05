"""What a capture that fails leaves of itself in torch's memory pools, which here keep books alone.

tests/gpu/test_captured.py has the same with torch's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch.torch_version import TorchVersion

from cotenant.device.cuda import graphs
from cotenant.device.cuda.graphs import capture_graph

POOL = (0, 1)


class _Torch(NamedTuple):
    """How a version of torch deals with a capture that CUDA has invalidated."""

    version: str
    ends_allocation: bool  # before it tells the error
    releases_pool: bool  # with the graph


class _Pools:
    """Captures are in the books of the device's allocator, and of the host's, which only ``capture_end`` reaches."""

    def __init__(self) -> None:
        self.captures: list[tuple[int, int]] = []
        self.host_captures: list[tuple[int, int]] = []
        self.num_graphs: Counter[tuple[int, int]] = Counter()

    def begin(self, pool: tuple[int, int]) -> None:
        self.captures.append(pool)
        self.num_graphs[pool] += 1
        if pool in self.host_captures:
            raise RuntimeError("already recording to mempool_id")
        self.host_captures.append(pool)

    def end(self, device: int, pool: tuple[int, int]) -> None:
        if pool not in self.captures:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.captures.remove(pool)

    def release(self, device: int, pool: tuple[int, int]) -> None:
        self.num_graphs[pool] -= 1
        assert self.num_graphs[pool] >= 0


def _graph_class(behaviour: _Torch, pools: _Pools, fault: list[str]) -> type:
    class Graph:
        is_captured = has_begun = False

        def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
            self._pool = pool
            if "stream" in fault:
                raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
            self.has_begun = True
            pools.begin(pool)
            if "beginning" in fault:
                pools.host_captures.remove(pool)
                raise RuntimeError("cudaStreamBeginCapture failed")
            self._is_noted = True

        def capture_end(self) -> None:
            if "invalidated" in fault and not behaviour.ends_allocation:
                raise RuntimeError("operation failed due to a previous error during capture")
            if not self._is_noted:
                raise RuntimeError("capture_end() called before capture_begin().")
            self._is_noted = False
            pools.end(0, self._pool)
            pools.host_captures.remove(self._pool)
            if "invalidated" in fault:
                raise RuntimeError("operation failed due to a previous error during capture")
            self.is_captured = True
            if "too large" in fault:
                raise RuntimeError("cannot instantiate")

        def pool(self) -> tuple[int, int]:
            if not self.is_captured:
                raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
            return self._pool

        def __del__(self) -> None:
            if self.is_captured or (self.has_begun and behaviour.releases_pool):
                pools.release(0, self._pool)

    return Graph


class _Driver:
    """A capture that is begun through the driver is a sound one."""

    api = SimpleNamespace(CUstreamCaptureMode=SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1))

    def __init__(self, fault: list[str]) -> None:
        self._fault = fault

    def call(self, name: str, stream: int, mode: int) -> None:
        assert (name, stream, mode) == ("cuStreamBeginCapture", 7, 1)
        self._fault.clear()


def _failure(run: Callable[[], None]) -> str:
    """The message alone: an error holds the frames in which it was raised, and the graph with them."""
    try:
        capture_graph(run, POOL, warm_up=False)
    except (RuntimeError, ValueError) as error:
        return str(error)
    raise AssertionError("the capture did not fail")


@pytest.mark.parametrize(
    "behaviour",
    [
        _Torch("2.11.0+cu130", ends_allocation=False, releases_pool=False),
        _Torch("2.13.0+cu130", ends_allocation=True, releases_pool=False),
        _Torch("2.13.1+cu130", ends_allocation=True, releases_pool=True),
    ],
    ids=lambda behaviour: behaviour.version,
)
def test_a_capture_that_fails_leaves_the_pool_to_the_others(behaviour: _Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    pools, fault = _Pools(), list[str]()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _graph_class(behaviour, pools, fault))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(graphs, "Driver", lambda: _Driver(fault))
    monkeypatch.setattr(torch, "__version__", TorchVersion(behaviour.version))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", pools.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", pools.release, raising=False)

    def do_nothing() -> None:
        pass

    def synchronize() -> None:
        fault.append("invalidated")
        raise ValueError("not while a graph is captured")

    def from_elsewhere() -> None:
        fault.append("invalidated")

    def go_wrong() -> None:
        raise ValueError("no fault of the capture's")

    def be_too_large() -> None:
        fault.append("too large")

    kept = capture_graph(do_nothing, POOL, warm_up=False)
    for run, message in (
        (synchronize, "not while a graph is captured"),
        (from_elsewhere, "operation failed due to a previous error during capture"),
        (go_wrong, "no fault of the capture's"),
        (be_too_large, "cannot instantiate"),
    ):
        assert _failure(run) == message
        fault.clear()
        assert pools.captures == pools.host_captures == []
        assert pools.num_graphs[POOL] == 1
    for kind, message in (
        ("beginning", "cudaStreamBeginCapture failed"),
        ("stream", "CUDA graphs must be captured on a non-default stream."),
    ):
        fault.append(kind)
        assert _failure(do_nothing) == message
        fault.clear()
        assert pools.captures == pools.host_captures == []
        assert pools.num_graphs[POOL] == 1
    another = capture_graph(do_nothing, POOL, warm_up=False)
    assert pools.num_graphs[POOL] == 2
    del kept, another
    assert pools.num_graphs[POOL] == 0
