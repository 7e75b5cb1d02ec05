"""Attention of a decode step over the paged KV cache, as fast as an SM takes in data, where a partition has few of them
(bench/decode_attention.py)."""

from __future__ import annotations

import ctypes
import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from cotenant.device.cuda.compiled import CompiledKernel, pointer
from cotenant.models.decode_chunks import MOST_HEADS, TILE_TOKENS, num_chunks, num_units
from cotenant.models.kernels.overlap import overlap
from cotenant.models.kernels.skinny import multiprocessors
from cotenant.models.spec import ModelSpec

_RESERVED_BYTES = 1024  # of an SM's shared memory, by each program there


class _Shape(NamedTuple):
    """What the kernel is compiled for."""

    width: int
    kv_heads: int
    group: int
    page_tokens: int
    window: int
    is_bf16: bool

    @property
    def units(self) -> int:
        """Of each chunk."""
        return num_units(self.kv_heads * self.group, self.kv_heads)

    @property
    def sums_bytes(self) -> int:
        """Of a unit: what its query heads attend to, in float32; of four heads as for four."""
        return self.width * (4 if self.group <= 4 else MOST_HEADS) * 4

    @property
    def states_bytes(self) -> int:
        return MOST_HEADS * 8


class _Cut(NamedTuple):
    """Programs of ``num_warps``, each warp of which reads ``num_stages`` tiles ahead; so many of them share an SM, and
    while one adds up what its warps have, the others go on."""

    num_warps: int
    num_stages: int
    per_sm: int

    def shared_bytes(self, shape: _Shape) -> int:
        tiles = self.num_stages * 2 * TILE_TOKENS * shape.width * 2
        return self.num_warps * (tiles + shape.sums_bytes + shape.states_bytes) + 16

    def within(self, shape: _Shape, shared_bytes: int) -> _Cut:
        """As much of it as has room on an SM, whose programs may take ``shared_bytes``."""
        cut = self
        while cut.num_stages > 2 and cut.shared_bytes(shape) > shared_bytes:
            cut = cut._replace(num_stages=cut.num_stages - 1)
        room = (shared_bytes + _RESERVED_BYTES) // (cut.shared_bytes(shape) + _RESERVED_BYTES)
        return cut._replace(per_sm=max(1, min(cut.per_sm, room)))


# By the width of a head: what an SM has room for, of shared memory (Hopper's) and registers.
_CUTS = {64: _Cut(4, 4, 3), 128: _Cut(4, 2, 3), 256: _Cut(2, 2, 2)}


def decode_bytes(spec: ModelSpec, width: int, num_sequences: int, max_model_len: int) -> int:
    """What ``DecodeAttention`` keeps on the device."""
    shape = _Shape(width, spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, 1, 0, True)
    units = num_chunks(num_sequences, max_model_len, shape.units) * shape.units
    return units * (shape.sums_bytes + shape.states_bytes) + num_sequences * shape.units * 4


class DecodeAttention:
    """For one layer after the other, in one step at a time. It is compiled where it is first called, or before by
    ``compile``."""

    def __init__(
        self,
        spec: ModelSpec,
        device: torch.device,
        dtype: torch.dtype,
        width: int,
        page_tokens: int,
        num_sequences: int,
        max_model_len: int,
    ) -> None:
        """``width``: the room that a head has in the cache."""
        group = spec.num_heads // spec.num_kv_heads
        window = spec.sliding_window or 0
        self._shape = _Shape(width, spec.num_kv_heads, group, page_tokens, window, dtype == torch.bfloat16)
        self._device = device
        self._scale = math.log2(math.e) / math.sqrt(spec.head_dim)  # of the model's heads, however wide they lie
        self._max_model_len = max_model_len
        units = num_chunks(num_sequences, max_model_len, self._shape.units) * self._shape.units
        self._sums = torch.empty((units, self._shape.sums_bytes // 4), dtype=torch.float32, device=device)
        self._states = self._sums.new_empty((units, self._shape.states_bytes // 4))
        self._counters = torch.zeros(num_sequences * self._shape.units, dtype=torch.int32, device=device)

    def compile(self) -> None:
        """Raises InvalidInputError without NVRTC."""
        self._compiled()

    def __call__(
        self,
        query: torch.Tensor,
        layer_cache: torch.Tensor,
        lists: torch.Tensor,
        out: torch.Tensor,
        *,
        begins_early: bool = False,
    ) -> torch.Tensor:
        """``query`` and ``out`` [rows, heads, width]; ``layer_cache`` [pages, 2, page_tokens, kv_heads, width], a view
        of one layer; ``lists``: ``decode_chunks.cut`` of the sequences, and their pages behind it, int32. Rows behind
        the last sequence are not written. ``begins_early``: the kernel before is one of a chain (``overlap``)."""
        sms, shape = multiprocessors(self._device), self._shape
        assert query.is_contiguous()
        assert out.is_contiguous()
        assert layer_cache[0].is_contiguous()
        assert layer_cache.shape[1:] == (2, shape.page_tokens, shape.kv_heads, shape.width)
        kernel, cut = self._compiled()
        kernel.launch(
            min(cut.per_sm * sms.num, num_chunks(len(query), self._max_model_len, shape.units) * shape.units),
            32 * cut.num_warps,
            (
                pointer(query),
                pointer(layer_cache),
                (layer_cache.stride(0), ctypes.c_longlong),
                pointer(lists),
                pointer(self._sums),
                pointer(self._states),
                pointer(self._counters),
                pointer(out),
                (self._scale, ctypes.c_float),
            ),
            begins_early=begins_early and overlap(self._device)["launch_pdl"],
        )
        return out

    def _compiled(self) -> tuple[CompiledKernel, _Cut]:
        device = self._device
        return _compiled(self._shape, multiprocessors(device).shared_bytes, overlap(device)["launch_pdl"])


@cache
def _compiled(shape: _Shape, shared_bytes: int, overlaps: bool) -> tuple[CompiledKernel, _Cut]:
    cut = _CUTS[shape.width].within(shape, shared_bytes)
    constants = {
        "WIDTH": shape.width,
        "KV_HEADS": shape.kv_heads,
        "GROUP": shape.group,
        "PAGE_TOKENS": shape.page_tokens,
        "WINDOW": shape.window,
        "IS_BF16": int(shape.is_bf16),
        "WARPS": cut.num_warps,
        "STAGES": cut.num_stages,
        "PER_SM": cut.per_sm,
        "OVERLAP": int(overlaps),
    }
    source = Path(__file__).with_suffix(".cu").read_text()
    return CompiledKernel(source, "decode_attention", constants, cut.shared_bytes(shape)), cut
