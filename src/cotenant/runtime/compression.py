"""Whether decode steps read compressed copies of the weights: `--compress-weights`."""

from __future__ import annotations

import logging

import torch

from cotenant.config import CacheConfig, ModelConfig
from cotenant.core.errors import InvalidInputError
from cotenant.models.compressed import BLOCK_COLUMNS, is_compressible
from cotenant.models.decoder import Decoder
from cotenant.models.lora import MODULE_GROUPS
from cotenant.models.products import has_triton
from cotenant.models.spec import ModelSpec

logger = logging.getLogger(__name__)

_MIN_CAPABILITY = (9, 0)  # whose tensor cores take what was decoded from registers
_MEASURED_MAJOR = 9  # Hopper: the GPUs on which steps are known to be shorter
_COPY_BYTES = 1.5  # of each weight
# What "auto" takes for the copies at most, of the memory that the server may use.
_MOST_SHARE = 0.1
# Smaller matrices are read within a fraction of a millisecond.
_LEAST_BYTES = 1 << 30


def compresses(
    config: ModelConfig, cache: CacheConfig, device: torch.device, spec: ModelSpec, dtype: torch.dtype
) -> bool:
    """The same at each start on the same GPU, whoever else has memory there. Raises InvalidInputError, saying why and
    what to do, where it was asked for and cannot be done."""
    if config.compress_weights == "off":
        return False
    problem = _problem(config, device, spec, dtype)
    if config.compress_weights == "auto":
        return problem is None and _pays(cache, device, spec)
    if problem is not None:
        raise InvalidInputError(f"--compress-weights on: {problem}; leave it out", param="compress-weights")
    return True


def _pays(cache: CacheConfig, device: torch.device, spec: ModelSpec) -> bool:
    """Whether steps are known to be shorter, and nobody misses the memory: of pages that were asked for none is
    taken."""
    needed = copies_bytes(spec)
    if torch.cuda.get_device_capability(device)[0] != _MEASURED_MAJOR or needed < _LEAST_BYTES:
        return False
    usable = cache.gpu_memory_utilization * torch.cuda.get_device_properties(device).total_memory
    is_little = needed <= _MOST_SHARE * usable
    if not is_little:
        sizes = needed / 2**30, _MOST_SHARE, usable / 2**30
        logger.info("--compress-weights auto: not done, copies take %.1f GiB, more than %g of %.1f", *sizes)
    return is_little and cache.num_pages is None


def copies_bytes(spec: ModelSpec) -> float:
    """What copies of all matrices that decode steps read take."""
    return _COPY_BYTES * (spec.layer_parameters + spec.vocab_size * spec.hidden_size)


def tell(config: ModelConfig, decoder: Decoder) -> None:
    """What was asked for and came of it."""
    if decoder.weights.is_compressed:
        gib = decoder.weights.copies_bytes / 2**30
        logger.info("decode steps read compressed copies of the weights: %.1f GiB (--compress-weights)", gib)
    elif config.compress_weights == "on":
        logger.warning("--compress-weights on: none of the model's matrices gets smaller; decode steps read them")


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
