"""The decoder's steps between its matrix products, one kernel each.

They round where transformers rounds, so that a step gives what the plain torch operations give: a norm is rounded to
the model's dtype before its weight is applied, and so is the sum that it is taken of.

What reads a product takes it unfinished too: then it adds up the product's partial sums, rounds, adds the adapters'
deltas ``h @ b.T``, and rounds again, as if the product had been finished before.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from cotenant.models.kernels.lora import Delta, load_sum, piece_at
from cotenant.models.kernels.skinny import Unfinished

# With adapters: the most heads per program of rope; columns of each half and neighbouring rows per program of silu, and
# its warps.
DELTA_HEADS = 4
DELTA_SILU_BLOCK = 256
DELTA_SILU_PIECE = 8
DELTA_SILU_WARPS = 4


@triton.jit
def _embed_kernel(ids, last_tokens, seats, table, out, hidden, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    token = tl.load(ids + row).to(tl.int64)
    if token < 0:
        token = tl.load(last_tokens + tl.load(seats + row).to(tl.int64))
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < hidden
    tl.store(out + row.to(tl.int64) * hidden + columns, tl.load(table + token * hidden + columns, mask), mask)


def embed(token_ids: torch.Tensor, last_tokens: torch.Tensor, seats: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows of ``table`` [vocab, hidden] for ``token_ids`` [tokens]: [tokens, hidden].

    A negative id stands for the last token of the row's seat, ``last_tokens[seats[row]]``.
    """
    num_tokens, hidden = token_ids.shape[0], table.shape[1]
    out = torch.empty((num_tokens, hidden), dtype=table.dtype, device=table.device)
    block = min(1024, triton.next_power_of_2(hidden))
    grid = (num_tokens, triton.cdiv(hidden, block))
    _embed_kernel[grid](token_ids, last_tokens, seats, table, out, hidden, BLOCK=block)
    return out


def _delta_arguments(delta: Delta | None) -> tuple[object, ...]:
    """For kernels: slots, ranks, stack, elements per slot, b's offset, h's partial sums, their number, h's columns."""
    if delta is None:
        return None, None, None, 0, 0, None, 0, 0
    adapters, sums = delta
    return (
        adapters.slots,
        adapters.ranks,
        adapters.stack,
        adapters.stack.stride(0),
        adapters.b_offset,
        sums,
        sums.shape[0],
        sums.shape[2],
    )


@triton.jit
def _norm_kernel(
    x,
    residual,
    weight,
    out,
    hidden,
    epsilon,
    adapters,
    ranks,
    stack,
    slot_stride,
    offset,
    h_sums,
    H_SPLITS: tl.constexpr,
    H_WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    value = load_sum(x + row * hidden + columns, num_rows * hidden, mask, SPLITS).to(out.dtype.element_ty)
    if H_SPLITS > 0:
        slot = tl.load(adapters + row)
        if slot >= 0:
            rank = tl.multiple_of(tl.load(ranks + slot), 16)
            b = stack + slot.to(tl.int64) * slot_stride + rank.to(tl.int64) * offset + columns
            h = h_sums + row * H_WIDTH
            delta = tl.zeros((BLOCK,), tl.float32)
            for first in range(0, rank, 16):
                for index in tl.static_range(16):
                    down = load_sum(h + first + index, num_rows * H_WIDTH, rank > 0, H_SPLITS).to(value.dtype)
                    up = tl.load(b + (first + index) * hidden, mask, other=0.0)
                    delta += down.to(tl.float32) * up.to(tl.float32)
            value = (value.to(tl.float32) + delta).to(value.dtype)
    if ADD:
        value += tl.load(residual + row * hidden + columns, mask, other=0.0)
        tl.store(residual + row * hidden + columns, value, mask)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / hidden + epsilon)
    normed = (wide * scale).to(value.dtype)
    tl.store(out + row * hidden + columns, normed * tl.load(weight + columns, mask), mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """[rows, hidden] -> [rows, hidden]"""
    return _norm(Unfinished.of(x), None, weight, epsilon)


def add_rms_norm(
    x: torch.Tensor | Unfinished, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Add ``x`` to ``residual`` in place, both [rows, hidden], and return the norm of the sum."""
    return _norm(Unfinished.of(x), residual, weight, epsilon)


def _norm(x: Unfinished, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    splits, num_rows, hidden = x.sums.shape
    out = torch.empty((num_rows, hidden), dtype=x.dtype, device=x.sums.device)
    block = triton.next_power_of_2(hidden)
    _norm_kernel[(num_rows,)](
        x.sums,
        residual,
        weight,
        out,
        hidden,
        epsilon,
        *_delta_arguments(x.delta),
        ADD=residual is not None,
        SPLITS=splits,
        BLOCK=block,
        num_warps=_warps(block) if x.delta is None else min(16, 2 * _warps(block)),
    )
    return out


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


@triton.jit
def _silu_times(gate, up):
    wide = gate.to(tl.float32)
    return (wide / (1.0 + tl.exp(-wide))).to(gate.dtype) * up


@triton.jit
def _silu_kernel(gate_up, out, width, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    source = gate_up + row * 2 * width + columns
    stride = tl.num_programs(0) * 2 * width
    gate = load_sum(source, stride, mask, SPLITS).to(out.dtype.element_ty)
    up = load_sum(source + width, stride, mask, SPLITS).to(out.dtype.element_ty)
    tl.store(out + row * width + columns, _silu_times(gate, up), mask)


@triton.jit
def _delta_silu_kernel(
    gate_up,
    out,
    width,
    adapters,
    ranks,
    stack,
    slot_stride,
    offset,
    h_sums,
    H_SPLITS: tl.constexpr,
    H_WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
):
    """A block of columns of the piece of rows that begins at this row; nothing if none does."""
    row = tl.program_id(0)
    num_rows = tl.num_programs(0)
    slot, length = piece_at(adapters, row, num_rows, PIECE)
    if length > 0:
        # Columns by rows: tensor cores take as few as 8 rows on this side.
        lanes = tl.arange(0, PIECE)[None, :]
        rows = (row + lanes).to(tl.int64)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
        within = columns < width
        mask = (lanes < length) & within
        source = gate_up + rows * 2 * width + columns
        gate = load_sum(source, num_rows * 2 * width, mask, SPLITS).to(out.dtype.element_ty)
        up = load_sum(source + width, num_rows * 2 * width, mask, SPLITS).to(out.dtype.element_ty)
        if slot >= 0:
            rank = tl.multiple_of(tl.load(ranks + slot), 16)
            b = stack + slot.to(tl.int64) * slot_stride + rank.to(tl.int64) * offset
            h = h_sums + rows * H_WIDTH
            gate_delta = tl.zeros((BLOCK, PIECE), tl.float32)
            up_delta = tl.zeros((BLOCK, PIECE), tl.float32)
            for first in range(0, rank, 16):
                inner = first + tl.arange(0, 16)
                matrix = b + inner[None, :].to(tl.int64) * 2 * width + columns
                gate_b = tl.load(matrix, within, other=0.0)
                up_b = tl.load(matrix + width, within, other=0.0)
                gate_h = load_sum(h + inner[:, None], num_rows * H_WIDTH, lanes < length, H_SPLITS)
                up_h = load_sum(h + (rank + inner)[:, None], num_rows * H_WIDTH, lanes < length, H_SPLITS)
                gate_delta = tl.dot(gate_b, gate_h.to(gate_b.dtype), gate_delta, input_precision="ieee")
                up_delta = tl.dot(up_b, up_h.to(up_b.dtype), up_delta, input_precision="ieee")
            gate = (gate.to(tl.float32) + gate_delta).to(gate.dtype)
            up = (up.to(tl.float32) + up_delta).to(up.dtype)
        tl.store(out + rows * width + columns, _silu_times(gate, up), mask)


def silu_and_multiply(gate_up: torch.Tensor | Unfinished) -> torch.Tensor:
    """silu of the left half times the right half: [rows, 2 * width] -> [rows, width]"""
    sums, dtype, delta = Unfinished.of(gate_up)
    splits, num_rows, width = sums.shape[0], sums.shape[1], sums.shape[2] // 2
    out = torch.empty((num_rows, width), dtype=dtype, device=sums.device)
    if delta is None:
        block = 1024
        _silu_kernel[(num_rows, triton.cdiv(width, block))](sums, out, width, SPLITS=splits, BLOCK=block, num_warps=4)
        return out
    _delta_silu_kernel[(num_rows, triton.cdiv(width, DELTA_SILU_BLOCK))](
        sums,
        out,
        width,
        *_delta_arguments(delta),
        SPLITS=splits,
        BLOCK=DELTA_SILU_BLOCK,
        PIECE=DELTA_SILU_PIECE,
        num_warps=DELTA_SILU_WARPS,
        num_stages=1,
    )
    return out


@triton.jit
def _rounded_product(x, y):
    """The product rounded to the factors' dtype, as float32: the sum that follows cannot be contracted with it."""
    return (x.to(tl.float32) * y.to(tl.float32)).to(x.dtype).to(tl.float32)


@triton.jit
def _rope_kernel(
    qkv,
    positions,
    slots,
    table,
    qk_norm,
    query,
    cache,
    page_stride,
    epsilon,
    adapters,
    ranks,
    stack,
    slot_stride,
    offset,
    h_sums,
    H_SPLITS: tl.constexpr,
    H_WIDTH: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    QK_NORM: tl.constexpr,
    SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]  # [HEADS, 1]
    lane = tl.arange(0, HALF)[None, :]  # [1, HALF]
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (lane < HEAD_DIM // 2)
    size: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    num_tokens = tl.num_programs(0)
    source = qkv + token * size + head * HEAD_DIM + lane
    low = load_sum(source, num_tokens * size, inside, SPLITS).to(query.dtype.element_ty)
    high = load_sum(source + HEAD_DIM // 2, num_tokens * size, inside, SPLITS).to(query.dtype.element_ty)
    if H_SPLITS > 0:
        adapter = tl.load(adapters + token)
        if adapter >= 0:
            rank = tl.multiple_of(tl.load(ranks + adapter), 16)
            b = stack + adapter.to(tl.int64) * slot_stride + rank.to(tl.int64) * offset + head * HEAD_DIM + lane
            # All heads of a program belong to one module.
            first_head = tl.program_id(1) * HEADS
            module = (first_head >= NUM_HEADS).to(tl.int32) + (first_head >= NUM_HEADS + NUM_KV_HEADS).to(tl.int32)
            h = h_sums + token * H_WIDTH + module * rank
            low_delta = tl.zeros((HEADS, HALF), tl.float32)
            high_delta = tl.zeros((HEADS, HALF), tl.float32)
            for first in range(0, rank, 16):
                for index in tl.static_range(16):
                    part = load_sum(h + first + index, num_tokens * H_WIDTH, rank > 0, H_SPLITS)
                    down = part.to(low.dtype).to(tl.float32)
                    up = b + (first + index) * size
                    low_delta += down * tl.load(up, inside, other=0.0).to(tl.float32)
                    high_delta += down * tl.load(up + HEAD_DIM // 2, inside, other=0.0).to(tl.float32)
            low = (low.to(tl.float32) + low_delta).to(low.dtype)
            high = (high.to(tl.float32) + high_delta).to(high.dtype)
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    new_low, new_high = low, high
    if QK_NORM:
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        total = tl.sum(wide_low * wide_low + wide_high * wide_high, 1)[:, None]
        scale = tl.rsqrt(total / HEAD_DIM + epsilon)
        weights = qk_norm + head * HEAD_DIM + lane
        rotated = inside & (head < NUM_HEADS + NUM_KV_HEADS)
        new_low = (wide_low * scale).to(low.dtype) * tl.load(weights, rotated, other=0.0)
        new_high = (wide_high * scale).to(low.dtype) * tl.load(weights + HEAD_DIM // 2, rotated, other=0.0)
    position = tl.load(positions + token).to(tl.int64)
    within = lane < HEAD_DIM // 2
    cos = tl.load(table + position * HEAD_DIM + lane, within, other=0.0)
    sin = tl.load(table + position * HEAD_DIM + HEAD_DIM // 2 + lane, within, other=0.0)
    left = _rounded_product(new_low, cos) - _rounded_product(new_high, sin)
    right = _rounded_product(new_high, cos) + _rounded_product(new_low, sin)
    out_low = tl.where(is_value, low, left.to(low.dtype))
    out_high = tl.where(is_value, high, right.to(low.dtype))
    is_query = inside & (head < NUM_HEADS)
    target = query + token * NUM_HEADS * HEAD_DIM + head * HEAD_DIM + lane
    tl.store(target, out_low, is_query)
    tl.store(target + HEAD_DIM // 2, out_high, is_query)
    slot = tl.load(slots + token).to(tl.int64)
    kept = inside & (head >= NUM_HEADS) & (slot >= 0)
    # [key or value, row in the page, head]; keys come before values.
    kv_head = head - NUM_HEADS
    place = (slot // PAGE_TOKENS) * page_stride + (kv_head // NUM_KV_HEADS) * (PAGE_TOKENS * NUM_KV_HEADS * HEAD_DIM)
    place += (slot % PAGE_TOKENS) * (NUM_KV_HEADS * HEAD_DIM) + (kv_head % NUM_KV_HEADS) * HEAD_DIM + lane
    tl.store(cache + place, out_low, kept)
    tl.store(cache + place + HEAD_DIM // 2, out_high, kept)


def rope_and_cache(
    qkv: torch.Tensor | Unfinished,
    positions: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    qk_norm: torch.Tensor | None,
    layer_cache: torch.Tensor,
    num_heads: int,
    epsilon: float,
) -> torch.Tensor:
    """Normalise (Qwen3) and rotate queries and keys, and put keys and values into the cache.

    ``qkv`` [tokens, (heads + 2 * kv_heads) * head_dim]; ``positions`` and ``slots`` [tokens] (a negative slot: nothing
    is cached); ``table`` [positions, head_dim]: cosines, then sines; ``layer_cache`` [pages, 2, page_tokens, kv_heads,
    head_dim], a view of one layer. Returns the queries, [tokens, heads, head_dim].
    """
    _, _, page_tokens, num_kv_heads, head_dim = layer_cache.shape
    sums, dtype, delta = Unfinished.of(qkv)
    splits, num_tokens = sums.shape[:2]
    query = torch.empty((num_tokens, num_heads, head_dim), dtype=dtype, device=sums.device)
    total = num_heads + 2 * num_kv_heads
    half = triton.next_power_of_2(head_dim // 2)
    heads, num_warps = 16 if num_tokens < 64 else triton.next_power_of_2(total), 4
    if delta is not None:
        heads = math.gcd(num_heads, num_kv_heads, DELTA_HEADS)
        num_warps = max(1, heads * half // 256)
    _rope_kernel[(num_tokens, triton.cdiv(total, heads))](
        sums,
        positions,
        slots,
        table,
        qk_norm,
        query,
        layer_cache,
        layer_cache.stride(0),
        epsilon,
        *_delta_arguments(delta),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        PAGE_TOKENS=page_tokens,
        QK_NORM=qk_norm is not None,
        SPLITS=splits,
        HEADS=heads,
        num_warps=num_warps,
    )
    return query
