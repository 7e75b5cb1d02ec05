"""How many KV pages the worker gets."""

from __future__ import annotations

import torch

from cotenant.config import ServerConfig
from cotenant.core.errors import InvalidInputError
from cotenant.device import Device
from cotenant.models.spec import ModelSpec


def page_bytes(spec: ModelSpec, page_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of one page: keys and values of ``page_tokens`` tokens in all layers."""
    return spec.num_layers * 2 * page_tokens * spec.num_kv_heads * spec.head_dim * dtype.itemsize


def training_bytes(spec: ModelSpec, tasklet_tokens: int, dtype: torch.dtype) -> int:
    """A generous estimate of what one micro-batch's activations need: about 14 hidden-sized and 5 MLP-sized tensors a
    token and layer, and a chunk of logits in fp32."""
    per_layer = 14 * spec.hidden_size + 5 * spec.intermediate_size
    return tasklet_tokens * per_layer * spec.num_layers * dtype.itemsize + 3 * 512 * spec.vocab_size * 4


def num_pages(
    config: ServerConfig, device: Device, spec: ModelSpec, dtype: torch.dtype, max_model_len: int, tasklet_tokens: int
) -> int:
    """Pages for ``--num-pages``, or as many as memory allows and the batch can ever use. Call with the weights loaded.

    Raises InvalidInputError when not even one request of full length fits.
    """
    cache, size = config.cache, page_bytes(spec, config.cache.page_tokens, dtype)
    pages_per_request = -(-max_model_len // cache.page_tokens)
    useful = config.batch.max_num_seqs * pages_per_request
    if cache.num_pages is not None:
        count = cache.num_pages
    elif device.torch_device.type == "cpu":
        count = min(useful, cache.cpu_cache_bytes // size)
    else:
        free, total = device.memory_bytes()
        reserved = 0 if config.coexecution.policy == "inference-only" else training_bytes(spec, tasklet_tokens, dtype)
        budget = total * cache.gpu_memory_utilization - (total - free)
        count = int(min(useful, min(budget, free - reserved) // size))
    if count < pages_per_request:
        raise InvalidInputError(
            f"the KV cache would have {max(count, 0)} pages of {cache.page_tokens} tokens, but one request of "
            f"{max_model_len} tokens needs {pages_per_request}: lower --max-model-len or give the cache more memory",
            param="max-model-len",
        )
    return count
