"""A CPU whose arenas run out of memory, as a GPU's do."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from cotenant.device.cpu.arena import CpuArena
from cotenant.device.cpu.device import CpuDevice


class LimitedDevice(CpuDevice):
    """At most ``num_chunks`` chunks have memory in each arena at the same time."""

    def __init__(self, num_chunks: int) -> None:
        super().__init__()
        self.num_chunks = num_chunks

    def create_arena(self, num_bytes: int, chunk_bytes: int) -> CpuArena:
        return _LimitedArena(self, num_bytes, chunk_bytes)


class _LimitedArena(CpuArena):
    def __init__(self, device: LimitedDevice, num_bytes: int, chunk_bytes: int) -> None:
        super().__init__(num_bytes, chunk_bytes)
        self._device = device

    def map(self, chunks: Iterable[int]) -> None:
        wanted = set(chunks)
        if len(self.mapped) + len(wanted) > self._device.num_chunks:
            raise torch.OutOfMemoryError(f"no memory for {len(wanted)} chunks beside {len(self.mapped)}")
        super().map(wanted)
