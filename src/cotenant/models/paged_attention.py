"""Attention over the paged KV cache for CUDA devices: prompt chunks through FlashInfer, decodes through a kernel of our
own (kernels/decode_attention.py).

What is planned or cut for a segment depends on the host's numbers alone, so nothing here waits for what the device
computes.

Heads of a width that there are no kernels for lie in wider rows of the cache. Nobody writes behind them, and a
cache reads as zeros where nobody wrote; behind queries there are zeros, too.
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from cotenant.models.attention import SdpaBackend, SegmentAttention
from cotenant.models.attention_kernels import has_compiler, kernel_head_dim, prepare
from cotenant.models.batch import PagedSegment, PageLists, Segment
from cotenant.models.decode_chunks import FIELDS, Int32Array, cut, num_chunks, num_units
from cotenant.models.products import has_triton
from cotenant.models.spec import ModelSpec

_WORKSPACE_BYTES = 256 * 1024 * 1024
_QUERY_TILE = 128  # rows of FlashInfer's largest tile: a key head's queries of several tokens
_MOST_MULTIPROCESSORS = 192
_MIN_CAPABILITY = (8, 0)  # that copies to shared memory without registers, as decodes do


def is_supported(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether FlashInfer is installed and there are kernels for this model on this device. Heads that need more room
    than they have are served by torch's own attention where nothing can be compiled: so the built-in model runs
    anywhere."""
    width = kernel_head_dim(spec.head_dim)
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and width is not None
        and importlib.util.find_spec("flashinfer") is not None
        and has_triton()
        and torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY
        and (width == spec.head_dim or has_compiler())
    )


def cache_head_dim(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> int:
    """How wide a head is in the KV cache: as the kernels want it, or where torch's own attention serves, as it is."""
    width = kernel_head_dim(spec.head_dim) if is_supported(spec, device, dtype) else None
    return width or spec.head_dim


def without_padding(attended: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[tokens, heads, width] of the cache -> [tokens, heads * head_dim]"""
    return attended[..., :head_dim].flatten(1)


def attention_bytes(spec: ModelSpec, max_num_seqs: int, max_model_len: int) -> int:
    """What ``PagedAttention`` keeps on a CUDA device."""
    if not has_triton():
        return 0
    from cotenant.models.kernels.decode_attention import decode_bytes

    width = kernel_head_dim(spec.head_dim)
    if width is None:
        return 0
    return _workspace_bytes(spec, width) + decode_bytes(spec, width, max_num_seqs, max_model_len)


def _workspace_bytes(spec: ModelSpec, width: int) -> int:
    """What FlashInfer may ask for: prompts are split over two tiles for each multiprocessor at most, and keep a partial
    result of each in float32 (``PrefillPlan`` in its scheduler.cuh)."""
    group = spec.num_heads // spec.num_kv_heads
    row_bytes = (width + 1) * 4
    return max(_WORKSPACE_BYTES, group * 2 * _MOST_MULTIPROCESSORS * _QUERY_TILE * row_bytes + (1 << 20))


class PagedAttention:
    """Runs the attention of decodes by ``decode``, and that of prompts by a wrapper that ``plan_prefill`` gives. What
    they keep on the device serves all of a decoder's segments: these run one after the other. A wrapper holds one plan,
    its last.

    ``kv_cache`` [pages, layers, 2, page_tokens, kv_heads, width], the width that ``cache_head_dim`` says. At most
    ``max_num_seqs`` sequences of ``max_model_len`` tokens decode."""

    def __init__(
        self,
        spec: ModelSpec,
        device: torch.device,
        dtype: torch.dtype,
        kv_cache: torch.Tensor,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        from cotenant.models.kernels.decode_attention import DecodeAttention  # needs Triton

        self.spec = spec
        self.device = device
        self.dtype = dtype
        self.page_tokens, _, self.width = kv_cache.shape[3:]
        self._scale = 1.0 / math.sqrt(spec.head_dim)  # of the model's heads, however wide they lie
        self._units = num_units(spec.num_heads, spec.num_kv_heads)
        self.most_chunk_fields = (1 + num_chunks(max_num_seqs, max_model_len, self._units)) * FIELDS
        self.workspace = torch.empty(_workspace_bytes(spec, self.width), dtype=torch.uint8, device=device)
        self.decode = DecodeAttention(spec, device, dtype, self.width, self.page_tokens, max_num_seqs, max_model_len)
        self._prefill: dict[str, Any] = {}
        self._num_plans: Counter[int] = Counter()  # by wrapper
        self._planned = torch.cuda.Event()
        self.kernels = prepare(spec, device, dtype)

    def decode_chunks(self, indptr: Int32Array, contexts: Sequence[int]) -> Int32Array:
        """What ``decode`` reads, on the host, before the pages of sequences with one new token each: no more than
        ``most_chunk_fields`` integers."""
        return cut(indptr, contexts, self.spec.sliding_window, self._units)

    def plan_prefill(self, query_lengths: Sequence[int], pages: PageLists) -> Any:
        """A planned wrapper for chunks of prompts: each query sees its sequence's tokens up to itself."""
        import flashinfer

        self.kernels.wait("fa2")
        backend = "fa3" if self.kernels.is_ready("fa3") else "fa2"
        if backend not in self._prefill:
            self._prefill[backend] = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                self.workspace, "NHD", backend=backend
            )
        spec, wrapper = self.spec, self._prefill[backend]
        indptr = np.zeros(len(query_lengths) + 1, dtype=np.int32)
        np.cumsum(query_lengths, out=indptr[1:])
        self._planned.synchronize()  # the device has read the last plan: its place on the host is free
        wrapper.plan(
            torch.from_numpy(indptr).pin_memory(),
            pages.indptr,
            pages.indices,
            pages.last_lengths,
            spec.num_heads,
            spec.num_kv_heads,
            self.width,
            self.page_tokens,
            causal=True,
            window_left=-1 if spec.sliding_window is None else spec.sliding_window - 1,
            sm_scale=self._scale,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
        )
        self._planned.record()
        self._num_plans[id(wrapper)] += 1
        return wrapper

    def num_plans(self, wrapper: Any) -> int:
        """How often ``plan_prefill`` has planned a wrapper: once more, and a plan before is gone."""
        return self._num_plans[id(wrapper)]


class PagedBackend:
    """Attention of batches that go through ``Decoder.layer`` on a CUDA device: paged segments as above, training
    segments by PyTorch's own kernels."""

    def __init__(self, paged: PagedAttention) -> None:
        self._paged = paged
        self._sdpa = SdpaBackend(paged.spec, paged.device, paged.dtype)

    def plan(self, segment: Segment, kv_cache: torch.Tensor | None) -> SegmentAttention:
        """Raises ValueError for a paged segment without a cache."""
        if not isinstance(segment, PagedSegment) or segment.pages is None:
            return self._sdpa.plan(segment, kv_cache)
        if kv_cache is None:
            raise ValueError("a PagedSegment needs a kv_cache")
        if segment.is_decode:
            return _PagedSegmentAttention(segment, kv_cache, self._decode(segment.context_lengths, segment.pages))
        return _PagedSegmentAttention(segment, kv_cache, self._prefill(segment.query_lengths, segment.pages))

    def _decode(self, contexts: Sequence[int], pages: PageLists) -> _Attend:
        chunks = torch.from_numpy(self._paged.decode_chunks(pages.indptr.numpy(), contexts))
        lists = torch.cat([chunks.pin_memory().to(self._paged.device, non_blocking=True), pages.indices])
        return lambda query, layer_cache: self._paged.decode(query, layer_cache, lists, torch.empty_like(query))

    def _prefill(self, query_lengths: Sequence[int], pages: PageLists) -> _Attend:
        wrapper = self._paged.plan_prefill(query_lengths, pages)
        plan = self._paged.num_plans(wrapper)

        def attend(query: torch.Tensor, layer_cache: torch.Tensor) -> torch.Tensor:
            assert self._paged.num_plans(wrapper) == plan, "a wrapper holds one plan"
            out: torch.Tensor = wrapper.run(query, layer_cache.unbind(1), out=torch.empty_like(query))
            return out

        return attend


# (queries [tokens, heads, width], the layer's part of the cache) -> the same shape
_Attend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _PagedSegmentAttention:
    def __init__(self, segment: PagedSegment, kv_cache: torch.Tensor, attend: _Attend) -> None:
        page_tokens = kv_cache.shape[3]
        self._attend = attend
        self._pages = segment.slots // page_tokens  # [tokens]
        self._rows = segment.slots % page_tokens  # [tokens]

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor | None
    ) -> torch.Tensor:
        assert kv_cache is not None
        keys, values = kv_cache[:, layer].unbind(1)  # each [pages, page_tokens, kv_heads, width]
        head_dim = key.shape[2]
        keys[self._pages, self._rows, :, :head_dim] = key
        values[self._pages, self._rows, :, :head_dim] = value
        query = F.pad(query, (0, keys.shape[3] - head_dim)).contiguous()
        return without_padding(self._attend(query, kv_cache[:, layer]), head_dim)
