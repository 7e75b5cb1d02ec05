"""An arena of GPU memory, through the CUDA driver's virtual memory management.

The driver is called through ``cuda.bindings``, which torch's CUDA builds bring along. A call costs the same whatever
the size of a chunk, tens of microseconds in all, so chunks of 32 MiB move a GiB in about a millisecond.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch

from cotenant.core.errors import InvalidInputError
from cotenant.device.arena import count_chunks, runs


class CudaArena:
    """See ``cotenant.device.arena.Arena``."""

    def __init__(self, device: torch.device, num_bytes: int, chunk_bytes: int) -> None:
        """Reserves ``num_bytes`` of addresses, rounded up to whole chunks. For a moment one chunk must fit in memory.

        Raises InvalidInputError without ``cuda.bindings``, torch.OutOfMemoryError when that one chunk does not fit.
        """
        torch.cuda.synchronize(device)  # the first call makes the context that the driver's calls below work in
        self._device = device
        self._driver = _Driver(device)
        self.num_chunks = count_chunks(num_bytes, chunk_bytes, self._driver.granularity_bytes())
        self.chunk_bytes = chunk_bytes
        reservation = _Reservation(self._driver, self.num_chunks * chunk_bytes, chunk_bytes)
        self._address, self._mapped = reservation.address, reservation.mapped
        # torch asks the driver whose memory this is, and the driver knows only of mapped memory. The tensor holds the
        # reservation and not the arena, or the two would keep each other alive.
        self._map([0])
        self._bytes = torch.as_tensor(reservation, device=device)  # [num_chunks * chunk_bytes]
        self._unmap([0])

    @property
    def mapped(self) -> frozenset[int]:
        return frozenset(self._mapped)

    def map(self, chunks: Iterable[int]) -> None:
        wanted = set(chunks)
        assert wanted.issubset(range(self.num_chunks)), f"chunks outside 0 to {self.num_chunks - 1}: {sorted(wanted)}"
        assert self._mapped.isdisjoint(wanted), f"chunks {sorted(self._mapped & wanted)} are mapped already"
        self._map(wanted)
        for run in runs(wanted):
            self._bytes[run.start * self.chunk_bytes : run.stop * self.chunk_bytes].zero_()

    def unmap(self, chunks: Iterable[int]) -> None:
        unwanted = set(chunks)
        assert self._mapped.issuperset(unwanted), f"chunks {sorted(unwanted - self._mapped)} are not mapped"
        torch.cuda.current_stream(self._device).synchronize()
        self._unmap(unwanted)

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        return self._bytes.view(dtype)

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        self._unmap(self.mapped)

    def _map(self, chunks: Collection[int]) -> None:
        """Map these chunks or none of them. What torch's allocator keeps for later is given back before giving up."""
        try:
            self._try_map(chunks)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            self._try_map(chunks)

    def _try_map(self, chunks: Collection[int]) -> None:
        done: list[int] = []
        try:
            for chunk in sorted(chunks):
                self._driver.map_new(self._address + chunk * self.chunk_bytes, self.chunk_bytes)
                self._mapped.add(chunk)
                done.append(chunk)
            for run in runs(chunks):
                self._driver.allow_access(self._address + run.start * self.chunk_bytes, len(run) * self.chunk_bytes)
        except BaseException as error:
            self._unmap(done)
            if isinstance(error, torch.OutOfMemoryError):
                free, total = torch.cuda.mem_get_info(self._device)
                raise torch.OutOfMemoryError(
                    f"cannot map {len(chunks)} chunks of {self.chunk_bytes >> 20} MiB: {self._device} has "
                    f"{free >> 20} MiB free of {total >> 20} MiB"
                ) from error
            raise

    def _unmap(self, chunks: Iterable[int]) -> None:
        _unmap(self._driver, self._address, self.chunk_bytes, self._mapped, chunks)


class _Reservation:
    """A range of addresses and the chunks that are mapped under it, all given back when nobody refers to it any more.

    ``__cuda_array_interface__`` lets torch make a tensor over it, which then refers to it.
    """

    def __init__(self, driver: _Driver, size_bytes: int, chunk_bytes: int) -> None:
        self.mapped: set[int] = set()
        self.address = driver.reserve(size_bytes)
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }
        finalizer = weakref.finalize(self, _release, driver, self.address, size_bytes, chunk_bytes, self.mapped)
        finalizer.atexit = False  # a process that ends gives everything back


def _release(driver: _Driver, address: int, size_bytes: int, chunk_bytes: int, mapped: set[int]) -> None:
    torch.cuda.synchronize(driver.device)
    _unmap(driver, address, chunk_bytes, mapped, frozenset(mapped))
    driver.free(address, size_bytes)


def _unmap(driver: _Driver, address: int, chunk_bytes: int, mapped: set[int], chunks: Iterable[int]) -> None:
    for chunk in chunks:  # the driver unmaps what was mapped in one call, no more and no less
        driver.unmap(address + chunk * chunk_bytes, chunk_bytes)
        mapped.remove(chunk)


class _Driver:
    """The driver's calls for one device, each return code checked."""

    def __init__(self, device: torch.device) -> None:
        try:
            self._api: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise InvalidInputError(
                "--device cuda needs the Python package cuda-bindings, which torch's CUDA builds install: "
                f"pip install cuda-bindings, of the same major version as torch.version.cuda ({torch.version.cuda})",
                param="device",
            ) from error
        self.device = device
        index = torch.cuda.current_device() if device.index is None else device.index
        self._memory = self._api.CUmemAllocationProp()
        self._memory.type = self._api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._memory.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._memory.location.id = index
        self._access = self._api.CUmemAccessDesc()
        self._access.location = self._memory.location
        self._access.flags = self._api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def _call(self, name: str, *arguments: Any) -> Any:
        """The call's value, None if it has none. Raises torch.OutOfMemoryError, and RuntimeError for other failures."""
        result, *values = getattr(self._api, name)(*arguments)
        if result == self._api.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{name}: the device has no memory left")
        if result != self._api.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}{arguments} failed: {result}")
        return values[0] if values else None

    def granularity_bytes(self) -> int:
        minimum = self._api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._memory, minimum))

    def reserve(self, size_bytes: int) -> int:
        return int(self._call("cuMemAddressReserve", size_bytes, 0, 0, 0))

    def free(self, address: int, size_bytes: int) -> None:
        self._call("cuMemAddressFree", address, size_bytes)

    def map_new(self, address: int, size_bytes: int) -> None:
        """Put new memory there, which nobody may touch yet."""
        handle = self._call("cuMemCreate", size_bytes, self._memory, 0)
        try:
            self._call("cuMemMap", address, size_bytes, 0, handle, 0)
        finally:
            self._call("cuMemRelease", handle)  # the mapping holds the memory from here on

    def allow_access(self, address: int, size_bytes: int) -> None:
        self._call("cuMemSetAccess", address, size_bytes, [self._access], 1)

    def unmap(self, address: int, size_bytes: int) -> None:
        self._call("cuMemUnmap", address, size_bytes)
