"""Queries, keys and values of a step: normalised, rotated, and put where attention reads them, in one kernel.

It rounds where transformers rounds, and completes the product that it reads, as ``elementwise`` does.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from cotenant.models.kernels.elementwise import delta_arguments
from cotenant.models.kernels.lora import load_h, load_sum
from cotenant.models.kernels.overlap import overlap, start_next, wait_for_previous
from cotenant.models.kernels.skinny import Unfinished

# With adapters: the most heads per program.
_DELTA_HEADS = 4


@triton.jit
def rounded_product(x, y):
    """The product rounded to the factors' dtype, as float32: the sum that follows cannot be contracted with it."""
    return (x.to(tl.float32) * y.to(tl.float32)).to(x.dtype).to(tl.float32)


@triton.jit
def _add_deltas(low, high, low_up, high_up, b, taken, size, half, h, stride, rank, H_SPLITS: tl.constexpr):
    """Both halves of heads with their adapter's ``h @ b.T``; of b the first 16 ranks have been read."""
    down = load_h(h, stride, rank, H_SPLITS, 16).to(low.dtype).to(tl.float32)[:, None, None]
    low_delta = tl.sum(down * low_up.to(tl.float32), 0)
    high_delta = tl.sum(down * high_up.to(tl.float32), 0)
    for first in range(16, rank, 16):
        more = load_h(h + first, stride, rank - first, H_SPLITS, 16)
        down = more.to(low.dtype).to(tl.float32)[:, None, None]
        low_delta += tl.sum(down * tl.load(b + first * size, taken, other=0.0).to(tl.float32), 0)
        high_delta += tl.sum(down * tl.load(b + first * size + half, taken, other=0.0).to(tl.float32), 0)
    return (low.to(tl.float32) + low_delta).to(low.dtype), (high.to(tl.float32) + high_delta).to(high.dtype)


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
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    QK_NORM: tl.constexpr,
    SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]  # [HEADS, 1]
    lane = tl.arange(0, HALF)[None, :]  # [1, HALF]
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (lane < HEAD_DIM // 2)
    size: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    num_tokens = tl.num_programs(0)
    if H_SPLITS > 0:
        adapter, rank = tl.load(adapters + token), tl.multiple_of(tl.load(ranks + token), 16)
        b = stack + adapter.to(tl.int64) * slot_stride + rank.to(tl.int64) * offset
        places = tl.arange(0, 16)[:, None, None] * size + (head * HEAD_DIM + lane)[None, :, :]
        taken = inside[None, :, :] & (rank > 0)
        low_up = tl.load(b + places, taken, other=0.0)  # the first 16 ranks; few adapters have more
        high_up = tl.load(b + HEAD_DIM // 2 + places, taken, other=0.0)
    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    within = lane < HEAD_DIM // 2
    cos = tl.load(table + position * HEAD_DIM + lane, within, other=0.0)
    sin = tl.load(table + position * HEAD_DIM + HEAD_DIM // 2 + lane, within, other=0.0)
    wait_for_previous(OVERLAP)
    source = qkv + token * size + head * HEAD_DIM + lane
    low = load_sum(source, num_tokens * size, inside, SPLITS).to(query.dtype.element_ty)
    high = load_sum(source + HEAD_DIM // 2, num_tokens * size, inside, SPLITS).to(query.dtype.element_ty)
    if H_SPLITS > 0:  # noqa: SIM102 - without adapters there is no rank
        if rank > 0:
            # All heads of a program belong to one module.
            first_head = tl.program_id(1) * HEADS
            module = (first_head >= NUM_HEADS).to(tl.int32) + (first_head >= NUM_HEADS + NUM_KV_HEADS).to(tl.int32)
            h, stride = h_sums + token * H_WIDTH + module * rank, num_tokens * H_WIDTH
            low, high = _add_deltas(
                low, high, low_up, high_up, b + places, taken, size, HEAD_DIM // 2, h, stride, rank, H_SPLITS
            )
    start_next(OVERLAP)
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
    left = rounded_product(new_low, cos) - rounded_product(new_high, sin)
    right = rounded_product(new_high, cos) + rounded_product(new_low, sin)
    out_low = tl.where(is_value, low, left.to(low.dtype))
    out_high = tl.where(is_value, high, right.to(low.dtype))
    is_query = inside & (head < NUM_HEADS)
    target = query + token * NUM_HEADS * WIDTH + head * WIDTH + lane
    tl.store(target, out_low, is_query)
    tl.store(target + HEAD_DIM // 2, out_high, is_query)
    kept = inside & (head >= NUM_HEADS) & (slot >= 0)
    # [key or value, row in the page, head]; keys come before values.
    kv_head = head - NUM_HEADS
    place = (slot // PAGE_TOKENS) * page_stride + (kv_head // NUM_KV_HEADS) * (PAGE_TOKENS * NUM_KV_HEADS * WIDTH)
    place += (slot % PAGE_TOKENS) * (NUM_KV_HEADS * WIDTH) + (kv_head % NUM_KV_HEADS) * WIDTH + lane
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
    width], a view of one layer, whose heads may lie in more room than they need. Returns the queries, [tokens, heads,
    width], with zeros behind each.
    """
    _, _, page_tokens, num_kv_heads, width = layer_cache.shape
    head_dim = table.shape[1]
    sums, dtype, delta = Unfinished.of(qkv)
    splits, num_tokens = sums.shape[:2]
    make = torch.empty if width == head_dim else torch.zeros
    query = make((num_tokens, num_heads, width), dtype=dtype, device=sums.device)
    total = num_heads + 2 * num_kv_heads
    half = triton.next_power_of_2(head_dim // 2)
    heads, num_warps = 16 if num_tokens < 64 else triton.next_power_of_2(total), 4
    if delta is not None:
        heads = math.gcd(num_heads, num_kv_heads, _DELTA_HEADS)
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
        *delta_arguments(delta),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        WIDTH=width,
        HALF=half,
        PAGE_TOKENS=page_tokens,
        QK_NORM=qk_norm is not None,
        SPLITS=splits,
        HEADS=heads,
        num_warps=num_warps,
        **overlap(query.device, isinstance(qkv, Unfinished)),
    )
    return query
