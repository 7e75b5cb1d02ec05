"""An NVIDIA GPU as a device: a high-priority stream for the online tenant, a low-priority one for best-effort work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cotenant.core.tasklet import TaskletShape
from cotenant.device.base import FinishedTasklet
from cotenant.device.cuda.arena import CudaArena
from cotenant.device.cuda.pacing import TaskletQueue
from cotenant.device.cuda.physical_memory import PhysicalMemory


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
        self.num_multiprocessors: int | None = torch.cuda.get_device_properties(self.torch_device).multi_processor_count
        self._online = torch.cuda.Stream(self.torch_device, priority=-1)
        self._best_effort = torch.cuda.Stream(self.torch_device, priority=0)
        self._default = torch.cuda.default_stream(self.torch_device)
        self._tasklets = TaskletQueue(self._best_effort)
        self._memory = PhysicalMemory(self.torch_device)

    @contextmanager
    def online(self) -> Iterator[None]:
        # New weights (an adapter that was loaded) come in on the default stream.
        self._online.wait_stream(self._default)
        with torch.cuda.stream(self._online):
            yield

    @contextmanager
    def fused(self) -> Iterator[None]:
        self._best_effort.wait_stream(self._default)
        self._best_effort.wait_stream(self._online)
        with torch.cuda.stream(self._best_effort):
            yield
        self._online.wait_stream(self._best_effort)

    def wait_for_room(self, interrupted: Callable[[], bool] | None = None) -> None:
        self._tasklets.wait_for_room(interrupted)

    def run_tasklet(self, launch: Callable[[], TaskletShape], *, behind_online: bool = False) -> None:
        if not self._default.query():
            self._best_effort.wait_stream(self._default)
        torch.cuda.set_stream(self._best_effort)  # in microseconds, where torch.cuda.stream takes tens of them
        try:
            self._tasklets.launch(launch, behind=self._online if behind_online else None)
        finally:
            torch.cuda.set_stream(self._default)

    def finished_tasklets(self) -> list[FinishedTasklet]:
        return self._tasklets.take_finished()

    def wait_for_tasklets(self) -> None:
        self._best_effort.synchronize()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def default_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def memory_bytes(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        unused = sum(_unused_bytes(segment) for segment in torch.cuda.memory_snapshot())
        return free + unused + self._memory.kept_bytes, total

    def release_kept_memory(self, most_bytes: int | None = None) -> bool:
        return self._memory.release(most_bytes) > 0

    def create_arena(self, num_bytes: int, chunk_bytes: int) -> CudaArena:
        return CudaArena(self._memory, num_bytes, chunk_bytes)


def _unused_bytes(segment: dict[str, Any]) -> int:
    """Of a piece of memory that torch's allocator holds, what other tensors may have: nothing, if it is a graph's."""
    is_graphs = segment["segment_pool_id"] != (0, 0)
    return 0 if is_graphs else int(segment["total_size"]) - int(segment["allocated_size"])
