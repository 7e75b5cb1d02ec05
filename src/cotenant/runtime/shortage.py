"""How a lack of memory shows."""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory, the device's or the host's, was not enough."""
    # On a CPU torch says so by an error of no class of its own.
    is_hosts = isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate" in str(error)
    return is_hosts or isinstance(error, torch.OutOfMemoryError)
