"""An arena of ordinary memory: one anonymous mapping, whose chunks are given back to the operating system."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable

import torch

from cotenant.device.arena import chunk_granularity, count_chunks, runs


class CpuArena:
    """See ``cotenant.device.arena.Arena``.

    The operating system puts memory under a page when it is first touched, so ``map`` costs nothing and cannot run out;
    a machine that does run out ends the process. Only Linux takes memory back from a mapping that stays: elsewhere
    ``unmap`` clears the chunks and the process keeps their memory.
    """

    def __init__(self, num_bytes: int, chunk_bytes: int) -> None:
        """Reserves ``num_bytes``, rounded up to whole chunks. Raises torch.OutOfMemoryError when there is no room."""
        self.num_chunks = count_chunks(num_bytes, chunk_bytes, chunk_granularity(torch.device("cpu")))
        self.chunk_bytes = chunk_bytes
        size_bytes = self.num_chunks * chunk_bytes
        try:
            # Private: from a shared mapping MADV_DONTNEED takes nothing back.
            self._memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise torch.OutOfMemoryError(f"cannot reserve {size_bytes} bytes of memory: {error}") from error
        # The tensor keeps the mapping alive, so the mapping is never closed by hand.
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)  # [size_bytes]
        self._mapped: set[int] = set()

    @property
    def mapped(self) -> frozenset[int]:
        return frozenset(self._mapped)

    def map(self, chunks: Iterable[int]) -> None:
        wanted = set(chunks)
        assert wanted.issubset(range(self.num_chunks)), f"chunks outside 0 to {self.num_chunks - 1}: {sorted(wanted)}"
        assert self._mapped.isdisjoint(wanted), f"chunks {sorted(self._mapped & wanted)} are mapped already"
        self._mapped |= wanted

    def unmap(self, chunks: Iterable[int], *, keep: bool = False) -> None:
        unwanted = set(chunks)
        assert self._mapped.issuperset(unwanted), f"chunks {sorted(unwanted - self._mapped)} are not mapped"
        for run in runs(unwanted):
            start, length = run.start * self.chunk_bytes, len(run) * self.chunk_bytes
            if sys.platform == "linux":
                self._memory.madvise(mmap.MADV_DONTNEED, start, length)
            else:
                self._bytes[start : start + length].zero_()
        self._mapped -= unwanted

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        return self._bytes.view(dtype)

    def close(self) -> None:
        self.unmap(self._mapped)
