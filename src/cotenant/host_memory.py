"""Large pieces of host memory that come and go quickly: whoever frees one may be the loop, or keep it waiting."""

from __future__ import annotations

import mmap
from contextlib import suppress


def allocate(num_bytes: int) -> mmap.mmap:
    """Zeros, of an address range of their own, which goes with the last reference. In huge pages, if the system has
    some: a piece of ordinary ones takes long to free. Raises MemoryError."""
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {num_bytes} bytes: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
