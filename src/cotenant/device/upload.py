"""From the host to the device."""

from __future__ import annotations

import torch


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device, which the host does not wait for: from pageable memory it would wait for all that was
    launched on the stream before."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
