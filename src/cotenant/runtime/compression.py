"""Whether decode steps read compressed copies of the weights: `--compress-weights`."""

from __future__ import annotations

import torch

from cotenant.config import ModelConfig
from cotenant.core.errors import InvalidInputError
from cotenant.models.compressed import BLOCK_COLUMNS, is_compressible
from cotenant.models.lora import MODULE_GROUPS
from cotenant.models.products import has_triton
from cotenant.models.spec import ModelSpec

_MIN_CAPABILITY = (9, 0)  # whose tensor cores take what was decoded from registers


def compresses(config: ModelConfig, device: torch.device, spec: ModelSpec, dtype: torch.dtype) -> bool:
    """Raises InvalidInputError, saying why and what to do, where it was asked for and cannot be done."""
    if config.compress_weights == "off":
        return False
    problem = _problem(config, device, spec, dtype)
    if problem is not None:
        raise InvalidInputError(f"--compress-weights on: {problem}; leave it out", param="compress-weights")
    return True


def _problem(config: ModelConfig, device: torch.device, spec: ModelSpec, dtype: torch.dtype) -> str | None:
    if device.type != "cuda" or not has_triton():
        return f"needs an NVIDIA GPU and Triton, not the device {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        found, needed = (".".join(map(str, each)) for each in (capability, _MIN_CAPABILITY))
        return f"needs compute capability {needed} or more, but {torch.cuda.get_device_name(device)} has {found}"
    if config.quantization is not None:
        return f"weights in {config.quantization} are smaller already"
    if dtype != torch.bfloat16:
        return f"goes with --dtype bfloat16, not {str(dtype).removeprefix('torch.')}"
    for modules in MODULE_GROUPS:
        num_out, num_in = spec.group_shape(modules)
        if not is_compressible(num_out, num_in):
            return (
                f"needs matrices whose sizes are multiples of {BLOCK_COLUMNS}, but that of {' and '.join(modules)} is "
                f"{num_out} by {num_in}"
            )
    return None
