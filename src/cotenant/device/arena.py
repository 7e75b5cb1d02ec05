"""An arena: addresses that are reserved once and never change, with physical memory that comes and goes under them.

Captured graphs and tensors hold addresses. So what grows and shrinks while it is in use lives in an arena, and chunks
of memory are mapped and unmapped under it.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import Protocol

import torch

_CUDA_GRANULARITY_BYTES = 2 << 20
# Of large arenas, as nearly as whole pages of a KV cache allow: a mapping costs the same whatever its size, and where
# sizes are equal, one arena takes what another one kept.
CHUNK_BYTES = 128 << 20


class Arena(Protocol):
    """``num_chunks`` chunks of ``chunk_bytes`` bytes, of which those in ``mapped`` have memory under them."""

    num_chunks: int
    chunk_bytes: int

    @property
    def mapped(self) -> frozenset[int]:
        """The chunks that have memory under them."""

    def map(self, chunks: Iterable[int]) -> None:
        """Put memory under these chunks, none of which has any. It reads as zeros to what is launched on the current
        stream from now on; other streams are ordered after it by the caller.

        All or nothing. Raises torch.OutOfMemoryError when the device has no memory left; nothing has changed then.
        """

    def unmap(self, chunks: Iterable[int], *, keep: bool = False) -> None:
        """Give the memory under these mapped chunks back, and forget its content.

        Waits for what was launched on the current stream; the caller has seen to it that nothing on another stream
        touches them. ``keep``: the device holds on to the memory, for whichever arena with chunks of the same size
        maps next. On CUDA that takes microseconds a chunk, where giving it back takes a millisecond or several per GiB.
        ``Device.release_kept_memory`` gives back what nobody took.
        """

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole range, flat: [num_chunks * chunk_bytes / itemsize]. It keeps addresses and memory alive.

        Touching a part that is not mapped is an error: an illegal address on CUDA; on the CPU it reads as zeros, and
        what is written there costs memory that nobody counts.
        """

    def close(self) -> None:
        """Unmap everything. The addresses are given back when the last tensor over them is gone."""


def chunk_granularity(device: torch.device) -> int:
    """The bytes of which a chunk's size is a multiple: 2 MiB on CUDA, a page of the operating system on the CPU."""
    return _CUDA_GRANULARITY_BYTES if device.type == "cuda" else mmap.PAGESIZE


def count_chunks(num_bytes: int, chunk_bytes: int, granularity_bytes: int) -> int:
    """How many chunks hold ``num_bytes``. Raises ValueError for sizes that an arena cannot have."""
    if num_bytes < 1:
        raise ValueError(f"an arena needs at least 1 byte, not {num_bytes}")
    if chunk_bytes < 1 or chunk_bytes % granularity_bytes:
        raise ValueError(f"chunks of {chunk_bytes} bytes: must be a positive multiple of {granularity_bytes}")
    return -(-num_bytes // chunk_bytes)


def runs(chunks: Iterable[int]) -> list[range]:
    """The fewest ranges that hold exactly these chunks, lowest first."""
    found: list[range] = []
    for chunk in sorted(chunks):
        if found and found[-1].stop == chunk:
            found[-1] = range(found[-1].start, chunk + 1)
        else:
            found.append(range(chunk, chunk + 1))
    return found
