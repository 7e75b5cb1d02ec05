"""The device under the tenants: one interface, two implementations. Nothing else of ours knows which one runs."""

from __future__ import annotations

import torch

from cotenant.core.errors import InvalidInputError
from cotenant.device.base import Device
from cotenant.device.cpu.device import CpuDevice
from cotenant.device.cuda.device import CudaDevice


def create_device(name: str) -> Device:
    """The device for `--device`: ``auto`` takes CUDA when there is one. Raises InvalidInputError when it is missing."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return CpuDevice()
    if not torch.cuda.is_available():
        raise InvalidInputError("--device cuda: torch finds no CUDA device on this machine", param="device")
    return CudaDevice()


__all__ = ["Device", "create_device"]
