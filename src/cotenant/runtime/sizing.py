"""How many KV pages the worker gets."""

from __future__ import annotations

import torch

from cotenant.config import BatchConfig, ServerConfig
from cotenant.core.errors import InvalidInputError
from cotenant.core.plan import Partition
from cotenant.device import Device
from cotenant.finetune.footprint import activation_bytes
from cotenant.models.lora_stacks import stack_bytes
from cotenant.models.paged_attention import attention_bytes, cache_head_dim
from cotenant.models.spec import ModelSpec
from cotenant.scheduler.space import nearest, prompt_shares

# Captured graphs, what libraries keep for themselves.
_SERVING_BYTES = 9 << 28
# Of a partition of the SMs: graphs of decode steps, and what the matrix library keeps for each of its two streams.
_PARTITION_BYTES = 256 << 20
_PROMPT_PARTITION_BYTES = 640 << 20  # one that has graphs of batches with prompts, besides


def prompt_partitions(config: ServerConfig, device: Device) -> tuple[Partition, ...]:
    """Those of the device's that batches with prompts are captured for."""
    policies = config.coexecution.policies or (config.coexecution.policy,)
    return nearest(device.partitions, tuple(share for policy in policies for share in prompt_shares(policy)))


def partition_bytes(*, with_prompts: bool) -> int:
    """What is captured for a partition takes so much at most, and what libraries keep for it."""
    return _PARTITION_BYTES + (_PROMPT_PARTITION_BYTES if with_prompts else 0)


def page_bytes(spec: ModelSpec, page_tokens: int, dtype: torch.dtype, head_dim: int | None = None) -> int:
    """Bytes of one page: keys and values of ``page_tokens`` tokens in all layers. ``head_dim``: the room that a head
    has there; None: what it needs."""
    return spec.num_layers * 2 * page_tokens * spec.num_kv_heads * (head_dim or spec.head_dim) * dtype.itemsize


def training_bytes(spec: ModelSpec, tasklet_tokens: int, dtype: torch.dtype) -> int:
    """What one micro-batch's activations need, and half as much again for an adapter's state."""
    return int(1.5 * activation_bytes(spec, tasklet_tokens, dtype))


def num_pages(
    config: ServerConfig,
    device: Device,
    spec: ModelSpec,
    dtype: torch.dtype,
    max_model_len: int,
    tasklet_tokens: int,
    way_out: str = "",
) -> tuple[int, int]:
    """(pages at the start, pages that the cache may grow to). Call with the weights loaded. ``way_out``: what else
    leaves more memory, for whom there is too little.

    At the start: ``--num-pages``, or as many as memory allows and the batch can ever use. Raises InvalidInputError when
    not even one request of full length fits.
    """
    cache, head_dim = config.cache, cache_head_dim(spec, device.torch_device, dtype)
    size = page_bytes(spec, cache.page_tokens, dtype, head_dim)
    batch = config.batch.resolved(device.torch_device.type)
    pages_per_request = -(-max_model_len // cache.page_tokens)
    useful = batch.max_num_seqs * pages_per_request
    free, total = device.memory_bytes()
    most = 0
    if device.torch_device.type != "cpu":
        most = min(useful, total // size)
        training = training_bytes(spec, tasklet_tokens, dtype) if config.coexecution.trains else 0
        stacks = stack_bytes(spec, config.lora.max_loras, config.lora.max_lora_rank, dtype)
        attention = attention_bytes(spec, batch.max_num_seqs, max_model_len)
        with_prompts = prompt_partitions(config, device)
        partitions = sum(partition_bytes(with_prompts=each in with_prompts) for each in device.partitions)
        own = _SERVING_BYTES + attention + stacks + partitions
        own += batch_bytes(spec, batch, dtype) + _kept_bytes(spec, batch, dtype)
        budget = total * cache.gpu_memory_utilization - (total - free) - own
        count = int(min(useful, min(budget, free - own - training) // size))
    else:
        count = min(useful, cache.cpu_cache_bytes // size)
    if cache.num_pages is not None:
        count = cache.num_pages
    if count < pages_per_request:
        goes_by_pages = cache.num_pages is not None or device.torch_device.type == "cpu"
        more = (
            f"give --num-pages {pages_per_request} or more"
            if goes_by_pages
            else f"raise --gpu-memory-utilization{way_out}"
        )
        raise InvalidInputError(
            f"the KV cache would have {max(count, 0)} pages of {cache.page_tokens} tokens, but one request of "
            f"{max_model_len} tokens needs {pages_per_request}: lower --max-model-len or {more}",
            param="max-model-len",
        )
    return count, max(count, most)


def batch_bytes(spec: ModelSpec, batch: BatchConfig, dtype: torch.dtype) -> int:
    """What the largest batch needs while it runs on all SMs, of requests that want no log-probabilities of their
    prompts: each token's widest activations, and each sequence's logits as they are computed, as they are picked for
    log-probabilities, as fp32, and a mark for each."""
    widest = 4 * spec.intermediate_size + 6 * spec.hidden_size
    logits = batch.max_num_seqs * spec.vocab_size * (2 * dtype.itemsize + 4 + 1)
    return batch.max_num_batched_tokens * widest * dtype.itemsize + logits


def _kept_bytes(spec: ModelSpec, batch: BatchConfig, dtype: torch.dtype) -> int:
    """Of each sequence from the start on: captured batches' logits, and what the sampler counts for penalties."""
    return batch.max_num_seqs * spec.vocab_size * (dtype.itemsize + 4)
