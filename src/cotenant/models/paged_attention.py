"""Attention over the paged KV cache through FlashInfer, for CUDA devices.

Prompt chunks and decodes are planned apart: FlashInfer's plan for a segment depends on the host's numbers alone, so
nothing here waits for the device.

Heads of a width that FlashInfer has no kernels for lie in wider rows of the cache. Nobody writes behind them, and a
cache reads as zeros where nobody wrote; behind queries there are zeros, too.
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from cotenant.models.attention import SdpaBackend, SegmentAttention
from cotenant.models.attention_kernels import has_compiler, kernel_head_dim, prepare
from cotenant.models.batch import PagedSegment, PageLists, Segment
from cotenant.models.products import has_triton
from cotenant.models.spec import ModelSpec

WORKSPACE_BYTES = 256 * 1024 * 1024
_QUERY_TILES = (16, 64, 128)  # rows of a tile: a key head's queries of several tokens
_MOST_MULTIPROCESSORS = 192


def is_supported(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether FlashInfer is installed and has kernels for this model on this device. Heads that need more room than
    they have are served by torch's own attention where nothing can be compiled: so the built-in model runs anywhere."""
    width = kernel_head_dim(spec.head_dim)
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and width is not None
        and importlib.util.find_spec("flashinfer") is not None
        and has_triton()
        and (width == spec.head_dim or has_compiler())
    )


def cache_head_dim(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> int:
    """How wide a head is in the KV cache: as the kernels want it, or where torch's own attention serves, as it is."""
    width = kernel_head_dim(spec.head_dim) if is_supported(spec, device, dtype) else None
    return width or spec.head_dim


def without_padding(attended: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[tokens, heads, width] of the cache -> [tokens, heads * head_dim]"""
    return attended[..., :head_dim].flatten(1)


def workspace_bytes(spec: ModelSpec, max_num_seqs: int) -> int:
    """What FlashInfer may ask for. A captured decode step always splits its contexts, and keeps a partial result in
    float32 for each tile of queries that its batch size could have; prompts are split over two tiles for each
    multiprocessor at most (``PrefillPlan`` in its scheduler.cuh)."""
    group = spec.num_heads // spec.num_kv_heads
    tile = next((size for size in _QUERY_TILES if size >= group), _QUERY_TILES[-1])
    num_tiles = -(-max_num_seqs * group // tile) + max_num_seqs
    row_bytes = ((kernel_head_dim(spec.head_dim) or spec.head_dim) + 1) * 4
    decodes = spec.num_heads * num_tiles * tile * row_bytes
    prompts = group * 2 * _MOST_MULTIPROCESSORS * _QUERY_TILES[-1] * row_bytes
    return max(WORKSPACE_BYTES, decodes + (1 << 20), prompts + (1 << 20))


class PagedAttention:
    """Plans and runs the attention of one kind of segment. One workspace serves all of a decoder's segments: they run
    one after the other on one stream. A wrapper holds one plan, its last.

    ``kv_cache`` [pages, layers, 2, page_tokens, kv_heads, width], the width that ``cache_head_dim`` says."""

    def __init__(
        self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_cache: torch.Tensor, max_num_seqs: int
    ) -> None:
        self.spec = spec
        self.device = device
        self.dtype = dtype
        self.page_tokens, _, self.width = kv_cache.shape[3:]
        self._scale = 1.0 / math.sqrt(spec.head_dim)  # of the model's heads, however wide they lie
        self.workspace = torch.empty(workspace_bytes(spec, max_num_seqs), dtype=torch.uint8, device=device)
        self._decode: Any = None
        self._prefill: dict[str, Any] = {}
        self._num_plans: Counter[int] = Counter()  # by wrapper
        self.kernels = prepare(spec, device, dtype)

    def plan_decode(self, pages: PageLists) -> Any:
        """A planned wrapper for sequences with one new token each."""
        import flashinfer

        if self._decode is None:
            self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self.workspace, "NHD", use_tensor_cores=True, backend="fa2"
            )
        self._num_plans[id(self._decode)] += 1
        return self.plan_wrapper(self._decode, pages)

    def captured_decode(self, batch_size: int, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor) -> Any:
        """A wrapper whose kernels can be captured: it reads these buffers on the device, of fixed addresses."""
        import flashinfer

        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last,
            backend="fa2",
        )

    def plan_wrapper(self, wrapper: Any, pages: PageLists) -> Any:
        """Plan a decode wrapper, captured or not, for these sequences."""
        spec = self.spec
        wrapper.plan(
            pages.indptr,
            pages.indices,
            pages.last_lengths,
            spec.num_heads,
            spec.num_kv_heads,
            self.width,
            self.page_tokens,
            window_left=-1 if spec.sliding_window is None else spec.sliding_window - 1,
            sm_scale=self._scale,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
        )
        return wrapper

    def plan_prefill(self, query_lengths: Sequence[int], pages: PageLists) -> Any:
        """A planned wrapper for chunks of prompts: each query sees its sequence's tokens up to itself."""
        import flashinfer

        backend = "fa3" if self.kernels.is_ready("fa3") else "fa2"
        if backend not in self._prefill:
            self._prefill[backend] = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                self.workspace, "NHD", backend=backend
            )
        spec, wrapper = self.spec, self._prefill[backend]
        indptr = np.zeros(len(query_lengths) + 1, dtype=np.int32)
        np.cumsum(query_lengths, out=indptr[1:])
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
        self._num_plans[id(wrapper)] += 1
        return wrapper

    def num_plans(self, wrapper: Any) -> int:
        """How often ``plan_decode`` or ``plan_prefill`` has planned a wrapper: once more, and a plan before is gone."""
        return self._num_plans[id(wrapper)]


class FlashInferBackend:
    """Attention of batches that go through ``Decoder.layer`` on a CUDA device: paged segments by FlashInfer, training
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
            wrapper = self._paged.plan_decode(segment.pages)
        else:
            wrapper = self._paged.plan_prefill(segment.query_lengths, segment.pages)
        return _PagedSegmentAttention(self._paged, wrapper, segment, kv_cache)


class _PagedSegmentAttention:
    def __init__(self, paged: PagedAttention, wrapper: Any, segment: PagedSegment, kv_cache: torch.Tensor) -> None:
        page_tokens = kv_cache.shape[3]
        self._paged = paged
        self._wrapper = wrapper
        self._plan = paged.num_plans(wrapper)
        self._pages = segment.slots // page_tokens  # [tokens]
        self._rows = segment.slots % page_tokens  # [tokens]

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor | None
    ) -> torch.Tensor:
        assert kv_cache is not None
        assert self._paged.num_plans(self._wrapper) == self._plan, "a wrapper holds one plan"
        keys, values = kv_cache[:, layer].unbind(1)  # each [pages, page_tokens, kv_heads, width]
        head_dim = key.shape[2]
        keys[self._pages, self._rows, :, :head_dim] = key
        values[self._pages, self._rows, :, :head_dim] = value
        query = F.pad(query, (0, keys.shape[3] - head_dim)).contiguous()
        out: torch.Tensor = self._wrapper.run(query, (keys, values), out=torch.empty_like(query))
        return without_padding(out, head_dim)
