"""An NVIDIA GPU as a device: a high-priority stream for the online tenant, a low-priority one for best-effort work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from cotenant.core.tasklet import TaskletShape
from cotenant.device.base import FinishedTasklet
from cotenant.device.cuda.arena import CudaArena

# An online kernel waits behind what is in flight; two tasklets keep the device fed while the next one is launched.
_MAX_IN_FLIGHT = 2


@dataclass(slots=True)
class _InFlight:
    shape: TaskletShape
    start: torch.cuda.Event
    end: torch.cuda.Event


class CudaDevice:
    """Tensors of the two lanes come from pools of their own: the caching allocator keeps one per stream.

    Invariant: a tensor that one lane allocates and the other reads is freed only when both are idle. The weights and
    the KV cache are allocated before the lanes exist and are never freed. A fused pass runs as a whole on the
    best-effort stream, where the training tensors live.
    """

    fuses = True
    overlaps = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name(self.torch_device)
        self._online = torch.cuda.Stream(self.torch_device, priority=-1)
        self._best_effort = torch.cuda.Stream(self.torch_device, priority=0)
        self._in_flight: deque[_InFlight] = deque()
        self._finished: list[FinishedTasklet] = []

    @contextmanager
    def online(self) -> Iterator[None]:
        # New weights (an adapter that was loaded) come in on the default stream.
        self._online.wait_stream(torch.cuda.default_stream(self.torch_device))
        with torch.cuda.stream(self._online):
            yield

    @contextmanager
    def fused(self) -> Iterator[None]:
        self._best_effort.wait_stream(torch.cuda.default_stream(self.torch_device))
        self._best_effort.wait_stream(self._online)
        with torch.cuda.stream(self._best_effort):
            yield
        self._online.wait_stream(self._best_effort)

    def run_tasklet(self, launch: Callable[[], TaskletShape]) -> None:
        while len(self._in_flight) >= _MAX_IN_FLIGHT:
            self._in_flight[0].end.synchronize()
            self._collect()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._best_effort.wait_stream(torch.cuda.default_stream(self.torch_device))
        with torch.cuda.stream(self._best_effort):
            start.record()
            shape = launch()
            end.record()
        self._in_flight.append(_InFlight(shape, start, end))

    def finished_tasklets(self) -> list[FinishedTasklet]:
        self._collect()
        finished, self._finished = self._finished, []
        return finished

    def _collect(self) -> None:
        while self._in_flight and self._in_flight[0].end.query():
            done = self._in_flight.popleft()
            self._finished.append(FinishedTasklet(done.shape, done.start.elapsed_time(done.end)))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def default_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def memory_bytes(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        cached = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return free + cached, total

    def create_arena(self, num_bytes: int, chunk_bytes: int) -> CudaArena:
        return CudaArena(self.torch_device, num_bytes, chunk_bytes)
