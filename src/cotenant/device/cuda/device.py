"""An NVIDIA GPU as a device: a high-priority stream for the online tenant, a low-priority one for best-effort work."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from cotenant.core.plan import Partition
from cotenant.core.tasklet import TaskletShape
from cotenant.device.base import Clocks, FinishedTasklet
from cotenant.device.cuda.arena import CudaArena
from cotenant.device.cuda.pacing import TaskletQueue
from cotenant.device.cuda.partitions import BEST_EFFORT_PRIORITY, ONLINE_PRIORITY, Partitions
from cotenant.device.cuda.physical_memory import PhysicalMemory

# Torch's allocator, as it is usually set, gives memory back in the pieces in which it got it, and none of which a part
# is in use. So a small tensor, the anchor, in an unused piece keeps it. A tensor is put into the smallest unused part
# that it fits into: before this piece come the rests of others, of which there are not many.
_ANCHOR_BYTES, _MOST_TRIED = 2 << 20, 256
_LEAST_ASIDE = 32 << 20  # less might lie in one piece with other tensors


class CudaDevice:
    """Tensors of the two lanes come from pools of their own: the caching allocator keeps one per stream.

    Invariant: a tensor that one lane allocates and the other reads is freed only when both are idle. The weights and
    the KV cache are allocated before the lanes exist and are never freed. A fused pass runs as a whole on the
    best-effort stream, where the training tensors live. A lane with partitions is several streams, of which each waits
    for the one that was used before it, so all of a lane's work is in the order in which it was launched.
    """

    fuses = True
    overlaps = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name(self.torch_device)
        properties = torch.cuda.get_device_properties(self.torch_device)
        self.num_multiprocessors: int | None = properties.multi_processor_count
        self.clocks = _clocks_of(properties)
        self.partitions: tuple[Partition, ...] = ()
        self._partitions = Partitions(self.torch_device)
        self._online = self._last_online = torch.cuda.Stream(self.torch_device, priority=ONLINE_PRIORITY)
        self._best_effort = torch.cuda.Stream(self.torch_device, priority=BEST_EFFORT_PRIORITY)
        self._default = self._current = torch.cuda.default_stream(self.torch_device)
        self._tasklets = TaskletQueue(self._best_effort)
        self._memory = PhysicalMemory(self.torch_device)
        self._retired: deque[object] = deque()
        self._anchor: torch.Tensor | None = None  # what keeps the memory that was set aside

    def split(self, online_sms: Iterable[int]) -> None:
        self._partitions.split(online_sms)
        self.partitions = tuple(self._partitions.streams)

    @contextmanager
    def online(self, partition: Partition | None = None) -> Iterator[None]:
        stream = self._online if partition is None else self._partitions.streams[partition].online
        if stream is not self._last_online:
            stream.wait_stream(self._last_online)
            self._last_online = stream
        self._wait_for_default(stream)
        with self._launching_on(stream):
            yield

    @contextmanager
    def fused(self) -> Iterator[None]:
        for stream in (self._default, self._last_online, self._tasklets.stream):
            self._best_effort.wait_stream(stream)
        with self._launching_on(self._best_effort):
            yield
        self._tasklets.stream = self._best_effort
        self._online.wait_stream(self._best_effort)
        self._last_online = self._online

    @contextmanager
    def _launching_on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """As torch.cuda.stream, which takes tens of microseconds: it asks for the stream that is known here."""
        outer = self._current
        self._switch_to(stream)
        try:
            yield
        finally:
            self._switch_to(outer)

    def _switch_to(self, stream: torch.cuda.Stream) -> None:
        self._current = stream
        torch._C._cuda_setStream(  # as torch.cuda.set_stream does
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )

    def _wait_for_default(self, stream: torch.cuda.Stream) -> bool:
        """New weights (an adapter that was loaded) come in on the default stream. Whether there is anything to wait
        for."""
        if self._default.query():
            return False
        stream.wait_stream(self._default)
        return True

    def wait_for_room(
        self, interrupted: Callable[[], bool] | None = None, ask_every_s: float = 1e-3, *, far_ahead: bool = False
    ) -> None:
        self._tasklets.wait_for_room(interrupted, ask_every_s, far_ahead=far_ahead)

    def has_room(self, *, far_ahead: bool = False, for_s: float = 0.0) -> bool:
        return self._tasklets.has_room(far_ahead=far_ahead, for_s=for_s)

    def host_was_away(self, seconds: float) -> None:
        self._tasklets.host_was_away(seconds)

    def run_tasklet(
        self,
        launch: Callable[[], TaskletShape],
        *,
        behind_online: bool = False,
        partition: Partition | None = None,
    ) -> None:
        stream = self._best_effort if partition is None else self._partitions.streams[partition].best_effort
        waits = self._wait_for_default(stream)
        behind = self._last_online if behind_online else None
        outer = self._current
        self._switch_to(stream)  # not through a context manager: this is done for each tasklet
        try:
            self._tasklets.launch(launch, stream, partition, behind, waits_for_others=waits)
        finally:
            self._switch_to(outer)

    @property
    def num_launched(self) -> int:
        return self._tasklets.num_launched

    def num_ended(self) -> int:
        return self._tasklets.num_ended()

    def is_training(self) -> bool:
        return self._tasklets.is_busy

    def tasklets_end(self) -> torch.cuda.Event | None:
        return self._tasklets.end_on_all_sms()

    def tasklets_left_ms(self) -> float:
        return self._tasklets.left_on_all_sms_ms()

    def finished_tasklets(self) -> list[FinishedTasklet]:
        return self._tasklets.take_finished()

    def wait_for_tasklets(self) -> None:
        self._tasklets.stream.synchronize()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def default_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def memory_bytes(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        unused = sum(_unused_bytes(segment) for segment in torch.cuda.memory_snapshot())
        return free + unused + self._memory.kept_bytes, total

    def release_kept_memory(self, most_bytes: int | None = None) -> bool:
        had_retired = self.has_retired and most_bytes is None
        if had_retired:
            self.destroy_retired()
        return self._memory.release(most_bytes) > 0 or had_retired

    def retire(self, graphs: Iterable[object]) -> None:
        self._retired.extend(graphs)

    @property
    def has_retired(self) -> bool:
        return bool(self._retired)

    def destroy_retired(self, most_s: float = math.inf) -> None:
        if not self._retired:
            return
        until_s = time.perf_counter() + most_s
        while self._retired and time.perf_counter() < until_s:
            self._retired.popleft()
        if not self._retired:
            torch.cuda.empty_cache()  # the memory of a pool without graphs can be given back now

    def set_aside(self, num_bytes: int) -> bool:
        num_bytes = max(num_bytes + _ANCHOR_BYTES, _LEAST_ASIDE)
        torch.cuda.empty_cache()
        tried: list[torch.Tensor] = []
        with self._launching_on(self._online), suppress(torch.OutOfMemoryError):
            piece = torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)
            inside = range(piece.data_ptr(), piece.data_ptr() + num_bytes)
            del piece
            while self._anchor is None and len(tried) < _MOST_TRIED:
                tried.append(torch.empty(_ANCHOR_BYTES, dtype=torch.uint8, device=self.torch_device))
                self._anchor = tried[-1] if tried[-1].data_ptr() in inside else None
        if self._anchor is None:
            tried.clear()
            torch.cuda.empty_cache()
        return self._anchor is not None

    def create_arena(self, num_bytes: int, chunk_bytes: int) -> CudaArena:
        return CudaArena(self._memory, num_bytes, chunk_bytes)


def _clocks_of(properties: object) -> Clocks | None:
    """``properties``: as torch.cuda.get_device_properties has them, which not every version does."""
    names = ("major", "minor", "clock_rate", "memory_clock_rate", "memory_bus_width")
    major, minor, sm_khz, memory_khz, bus_bits = (int(getattr(properties, name, 0)) for name in names)
    if min(sm_khz, memory_khz, bus_bits) <= 0:
        return None
    return Clocks((major, minor), sm_khz * 1e3, 2 * memory_khz * 1e3 * bus_bits / 8)  # data on both edges


def _unused_bytes(segment: dict[str, Any]) -> int:
    """Of a piece of memory that torch's allocator holds, what other tensors may have: nothing, if it is a graph's."""
    is_graphs = segment["segment_pool_id"] != (0, 0)
    return 0 if is_graphs else int(segment["total_size"]) - int(segment["allocated_size"])
