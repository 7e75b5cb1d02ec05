"""An arena of GPU memory: addresses that stay, and physical memory under them that comes and goes by chunks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable

import torch

from cotenant.device.arena import count_chunks, runs
from cotenant.device.cuda.physical_memory import PhysicalMemory

# Access is allowed to so many chunks in one call, and they are cleared in one, while the next are mapped.
_CHUNKS_AT_ONCE = 4


class CudaArena:
    """See ``cotenant.device.arena.Arena``."""

    def __init__(self, memory: PhysicalMemory, num_bytes: int, chunk_bytes: int) -> None:
        """Reserves ``num_bytes`` of addresses, rounded up to whole chunks. For a moment one chunk must fit in memory.

        Raises InvalidInputError without ``cuda.bindings``, torch.OutOfMemoryError when that one chunk does not fit.
        """
        self._memory, self._device = memory, memory.device
        self.num_chunks = count_chunks(num_bytes, chunk_bytes, memory.granularity_bytes())
        self.chunk_bytes = chunk_bytes
        reservation = _Reservation(memory, self.num_chunks * chunk_bytes, chunk_bytes)
        self._address, self._mapped = reservation.address, reservation.mapped
        # torch asks the driver whose memory this is, and the driver knows only of mapped memory. The tensor holds the
        # reservation and not the arena, or the two would keep each other alive.
        self._with_kept_memory(lambda: self._map_run(range(1)))
        self._bytes = torch.as_tensor(reservation, device=self._device)  # [num_chunks * chunk_bytes]
        self._unmap([0])

    @property
    def mapped(self) -> frozenset[int]:
        return frozenset(self._mapped)

    def map(self, chunks: Iterable[int]) -> None:
        wanted = set(chunks)
        assert wanted.issubset(range(self.num_chunks)), f"chunks outside 0 to {self.num_chunks - 1}: {sorted(wanted)}"
        assert self._mapped.isdisjoint(wanted), f"chunks {sorted(self._mapped & wanted)} are mapped already"
        self._with_kept_memory(lambda: self._map(wanted))

    def unmap(self, chunks: Iterable[int], *, keep: bool = False) -> None:
        unwanted = set(chunks)
        assert self._mapped.issuperset(unwanted), f"chunks {sorted(unwanted - self._mapped)} are not mapped"
        torch.cuda.current_stream(self._device).synchronize()
        self._unmap(unwanted, keep=keep)

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        return self._bytes.view(dtype)

    def close(self) -> None:
        if self._mapped:
            torch.cuda.synchronize(self._device)
            self._unmap(self.mapped)

    def _with_kept_memory(self, attempt: Callable[[], None]) -> None:
        """If it finds no memory, once more with what arenas and torch's allocator have kept for later."""
        try:
            attempt()
        except torch.OutOfMemoryError:
            self._memory.release()
            torch.cuda.empty_cache()
            attempt()

    def _map(self, chunks: Collection[int]) -> None:
        """Map these chunks or none of them. Some are cleared while the next are mapped: to map a chunk takes the host
        about as long as to clear one takes the device."""
        try:
            for run in runs(chunks):
                for first in range(run.start, run.stop, _CHUNKS_AT_ONCE):
                    some = range(first, min(first + _CHUNKS_AT_ONCE, run.stop))
                    self._map_run(some)
                    self._bytes[some.start * self.chunk_bytes : some.stop * self.chunk_bytes].zero_()
        except BaseException as error:
            torch.cuda.current_stream(self._device).synchronize()
            self._unmap(self._mapped.intersection(chunks))
            if isinstance(error, torch.OutOfMemoryError):
                free, total = torch.cuda.mem_get_info(self._device)
                raise torch.OutOfMemoryError(
                    f"cannot map {len(chunks)} chunks of {self.chunk_bytes >> 20} MiB: {self._device} has "
                    f"{free >> 20} MiB free of {total >> 20} MiB"
                ) from error
            raise

    def _map_run(self, run: range) -> None:
        """Map a run of chunks or none of it."""
        try:
            for chunk in run:
                self._memory.map(self._address + chunk * self.chunk_bytes, self.chunk_bytes)
                self._mapped.add(chunk)
            self._memory.allow_access(self._address + run.start * self.chunk_bytes, len(run) * self.chunk_bytes)
        except BaseException:
            self._unmap(self._mapped.intersection(run))
            raise

    def _unmap(self, chunks: Iterable[int], *, keep: bool = False) -> None:
        _unmap(self._memory, self._address, self.chunk_bytes, self._mapped, chunks, keep=keep)


class _Reservation:
    """A range of addresses and the chunks that are mapped under it, all given back when nobody refers to it any more.

    ``__cuda_array_interface__`` lets torch make a tensor over it, which then refers to it.
    """

    def __init__(self, memory: PhysicalMemory, size_bytes: int, chunk_bytes: int) -> None:
        self.mapped: set[int] = set()
        self.address = memory.reserve(size_bytes)
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }
        finalizer = weakref.finalize(self, _release, memory, self.address, size_bytes, chunk_bytes, self.mapped)
        finalizer.atexit = False  # a process that ends gives everything back


def _release(memory: PhysicalMemory, address: int, size_bytes: int, chunk_bytes: int, mapped: set[int]) -> None:
    if mapped:
        torch.cuda.synchronize(memory.device)
        _unmap(memory, address, chunk_bytes, mapped, frozenset(mapped), keep=False)
    memory.free(address, size_bytes)


def _unmap(
    memory: PhysicalMemory, address: int, chunk_bytes: int, mapped: set[int], chunks: Iterable[int], *, keep: bool
) -> None:
    for chunk in chunks:
        memory.unmap(address + chunk * chunk_bytes, chunk_bytes, keep=keep)
        mapped.remove(chunk)
