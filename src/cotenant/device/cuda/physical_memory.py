"""The physical memory of one GPU in whole pieces, through the CUDA driver's virtual memory management.

To create, map, allow access to or unmap a piece takes microseconds whatever its size; to give it back to the driver
takes a millisecond per GiB, or several. So pieces that one arena gives up can be kept for another.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from cotenant.device.cuda.driver import Driver


class PhysicalMemory:
    """Puts memory under addresses, each piece in one call, and takes it from there in one call.

    Each piece is held by its one handle, which is released as it is given back to the driver: to let a mapping alone
    hold it, and to ask for the handle again, would be two calls more.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._opened: _Driver | None = None
        self._mapped: dict[int, Any] = {}  # by address: handles
        self._kept: defaultdict[int, list[Any]] = defaultdict(list)  # by size: handles of memory that nothing maps

    @property
    def _driver(self) -> _Driver:
        if self._opened is None:
            torch.cuda.synchronize(self.device)  # the first call makes the context that the driver's calls work in
            self._opened = _Driver(self.device)
            weakref.finalize(self, _give_back, self._opened, self._kept).atexit = False  # the driver then does it
        return self._opened

    def granularity_bytes(self) -> int:
        """What sizes are multiples of. Raises InvalidInputError without ``cuda.bindings``, as ``reserve`` does."""
        return self._driver.granularity_bytes()

    def reserve(self, size_bytes: int) -> int:
        """Addresses: the first of them."""
        return self._driver.reserve(size_bytes)

    def free(self, address: int, size_bytes: int) -> None:
        """Give addresses back, under which nothing is mapped."""
        self._driver.free(address, size_bytes)

    def map(self, address: int, size_bytes: int) -> None:
        """Put memory there, which nobody may touch yet: kept memory with whatever it holds, or new memory. Raises
        torch.OutOfMemoryError if there is none."""
        driver, kept = self._driver, self._kept[size_bytes]
        handle = kept.pop() if kept else driver.create(size_bytes)
        try:
            driver.map(address, size_bytes, handle)
        except BaseException:
            driver.release(handle)
            raise
        self._mapped[address] = handle

    def allow_access(self, address: int, size_bytes: int) -> None:
        self._driver.allow_access(address, size_bytes)

    def unmap(self, address: int, size_bytes: int, *, keep: bool) -> None:
        """The driver unmaps what was mapped in one call, no more and no less. ``keep``: for the next ``map``."""
        self._driver.unmap(address, size_bytes)
        handle = self._mapped.pop(address)
        if keep:
            self._kept[size_bytes].append(handle)
        else:
            self._driver.release(handle)

    @property
    def kept_bytes(self) -> int:
        return sum(size_bytes * len(handles) for size_bytes, handles in self._kept.items())

    def release(self, most_bytes: int | None = None) -> int:
        """Give kept memory back to the driver, all or at least ``most_bytes`` of it: how many bytes."""
        return _give_back(self._driver, self._kept, most_bytes) if self.kept_bytes else 0


def _give_back(driver: _Driver, kept: Mapping[int, list[Any]], most_bytes: int | None = None) -> int:
    num_bytes = 0
    for size_bytes, handles in kept.items():
        while handles and (most_bytes is None or num_bytes < most_bytes):
            driver.release(handles.pop())
            num_bytes += size_bytes
    return num_bytes


class _Driver:
    """The driver's calls for one device's memory."""

    def __init__(self, device: torch.device) -> None:
        driver = Driver()
        self._api, self._call = driver.api, driver.call
        index = torch.cuda.current_device() if device.index is None else device.index
        self._memory = self._api.CUmemAllocationProp()
        self._memory.type = self._api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._memory.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._memory.location.id = index
        self._access = self._api.CUmemAccessDesc()
        self._access.location = self._memory.location
        self._access.flags = self._api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def granularity_bytes(self) -> int:
        minimum = self._api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._memory, minimum))

    def reserve(self, size_bytes: int) -> int:
        return int(self._call("cuMemAddressReserve", size_bytes, 0, 0, 0))

    def free(self, address: int, size_bytes: int) -> None:
        self._call("cuMemAddressFree", address, size_bytes)

    def create(self, size_bytes: int) -> Any:
        return self._call("cuMemCreate", size_bytes, self._memory, 0)

    def release(self, handle: Any) -> None:
        self._call("cuMemRelease", handle)

    def map(self, address: int, size_bytes: int, handle: Any) -> None:
        self._call("cuMemMap", address, size_bytes, 0, handle, 0)

    def allow_access(self, address: int, size_bytes: int) -> None:
        self._call("cuMemSetAccess", address, size_bytes, [self._access], 1)

    def unmap(self, address: int, size_bytes: int) -> None:
        self._call("cuMemUnmap", address, size_bytes)
