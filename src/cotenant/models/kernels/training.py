"""A layer's steps between its matrix products for the many rows of a training batch, forward and backward, each one
kernel that reads its inputs once.

They round where the plain torch operations of ``elementwise_ops`` round. Launch grids follow from shapes alone, so that
they can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cotenant.models.kernels.rope import rounded_product

# Columns of each half per program of silu's backward.
_SILU_BLOCK = 1024
# Heads per program of the rotation.
_ROTATED_ROWS = 32


@triton.jit
def _norm_kernel(x, weight, out, hidden, epsilon, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * hidden
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    value = tl.load(x + start + columns, mask, other=0.0)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / hidden + epsilon)
    normed = (wide * scale).to(value.dtype)
    tl.store(out + start + columns, normed * tl.load(weight + columns, mask, other=0.0), mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """[rows, hidden] -> [rows, hidden]"""
    x = x.contiguous()
    out = torch.empty_like(x)
    num_rows, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    if num_rows:
        _norm_kernel[(num_rows,)](x, weight, out, hidden, epsilon, BLOCK=block, num_warps=_warps(block))
    return out


@triton.jit
def _norm_backward_kernel(x, weight, gradient, add, out, hidden, epsilon, ADD: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * hidden
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    value = tl.load(x + start + columns, mask, other=0.0)
    inner = tl.load(gradient + start + columns, mask, other=0.0)
    if ADD:
        more = tl.load(add + start + columns, mask, other=0.0)
    inner = (inner * tl.load(weight + columns, mask, other=0.0)).to(tl.float32)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / hidden + epsilon)
    unit = wide * scale
    mean = tl.sum(inner * unit, 0) / hidden
    result = ((inner - unit * mean) * scale).to(value.dtype)
    if ADD:
        result += more
    tl.store(out + start + columns, result, mask)


def norm_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    gradient: torch.Tensor,
    epsilon: float,
    add: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """From the gradient of ``rms_norm``'s output to that of ``x``, plus ``add``: all [rows, hidden]. ``out`` may be
    ``gradient`` or ``add``."""
    x, gradient = x.contiguous(), gradient.contiguous()
    if add is not None:
        add = add.contiguous()
    out = _given(out, x)
    num_rows, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    _norm_backward_kernel[(num_rows,)](
        x, weight, gradient, add, out, hidden, epsilon, ADD=add is not None, BLOCK=block, num_warps=_warps(block)
    )
    return out


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


@triton.jit
def _silu_backward_kernel(gate_up, gradient, activated, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    source = gate_up + row * 2 * width + columns
    gate = tl.load(source, mask, other=0.0)
    up = tl.load(source + width, mask, other=0.0)
    inner = tl.load(gradient + row * width + columns, mask, other=0.0)
    wide = gate.to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-wide))
    silu = (wide * sigmoid).to(gate.dtype)
    tl.store(activated + row * width + columns, silu * up, mask)
    gate_gradient = (inner * up).to(tl.float32) * sigmoid * (1.0 + wide * (1.0 - sigmoid))
    target = out + row * 2 * width + columns
    tl.store(target, gate_gradient.to(gate.dtype), mask)
    tl.store(target + width, inner * silu, mask)


def silu_backward(
    gate_up: torch.Tensor, gradient: torch.Tensor, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """From the gradient of silu(gate) * up [rows, width] to that of ``gate_up`` [rows, 2 * width], written to ``out``
    if given, which may be ``gate_up``. The product itself is made again in the memory of ``gradient``; returns the
    product, then the gradient."""
    num_rows, width = gradient.shape
    assert gate_up.is_contiguous()
    assert gradient.is_contiguous()
    out = _given(out, gate_up)
    grid = (num_rows, triton.cdiv(width, _SILU_BLOCK))
    _silu_backward_kernel[grid](gate_up, gradient, gradient, out, width, BLOCK=_SILU_BLOCK, num_warps=4)
    return gradient, out


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_kernel(
    heads,
    cos,
    signed_sin,
    weight,
    out,
    num_rows,
    epsilon,
    NUM_HEADS: tl.constexpr,
    NUM_ROTATED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A row is one rotated head of one token."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    lane = tl.arange(0, HALF)[None, :]  # [1, HALF]
    within = lane < HEAD_DIM // 2
    mask = (row < num_rows) & within
    token, head = row // NUM_ROTATED, row % NUM_ROTATED
    source = heads + (token * NUM_HEADS + head) * HEAD_DIM + lane
    low = tl.load(source, mask, other=0.0)
    high = tl.load(source + HEAD_DIM // 2, mask, other=0.0)
    cosine = tl.load(cos + token * HEAD_DIM + lane, mask, other=0.0)
    sine = tl.load(signed_sin + token * HEAD_DIM + HEAD_DIM // 2 + lane, mask, other=0.0)
    if NORM:
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        total = tl.sum(wide_low * wide_low + wide_high * wide_high, 1)[:, None]
        scale = tl.rsqrt(total / HEAD_DIM + epsilon)
        weights = weight + head * HEAD_DIM + lane
        low = (wide_low * scale).to(low.dtype) * tl.load(weights, mask, other=0.0)
        high = (wide_high * scale).to(low.dtype) * tl.load(weights + HEAD_DIM // 2, mask, other=0.0)
    target = out + row * HEAD_DIM + lane
    left = rounded_product(low, cosine) - rounded_product(high, sine)
    right = rounded_product(high, cosine) + rounded_product(low, sine)
    tl.store(target, left.to(low.dtype), mask)
    tl.store(target + HEAD_DIM // 2, right.to(low.dtype), mask)


def rotate_heads(
    heads: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    num_rotated: int,
    weight: torch.Tensor | None,
    epsilon: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The first ``num_rotated`` of ``heads`` [tokens, heads, head_dim], rotated: [tokens, num_rotated, head_dim],
    written to ``out`` if given. With ``weight`` [num_rotated, head_dim] they are normalised before. ``cos`` and
    ``signed_sin`` [tokens, 1, head_dim] are those of ``RopeTables.at``."""
    num_tokens, num_heads, head_dim = heads.shape
    assert heads.is_contiguous()
    assert cos.is_contiguous()
    assert signed_sin.is_contiguous()
    out = heads.new_empty(num_tokens, num_rotated, head_dim) if out is None else out
    assert out.is_contiguous()
    num_rows = num_tokens * num_rotated
    _rotate_kernel[(triton.cdiv(num_rows, _ROTATED_ROWS),)](
        heads,
        cos,
        signed_sin,
        weight,
        out,
        num_rows,
        epsilon,
        NUM_HEADS=num_heads,
        NUM_ROTATED=num_rotated,
        HEAD_DIM=head_dim,
        HALF=triton.next_power_of_2(head_dim // 2),
        NORM=weight is not None,
        ROWS=_ROTATED_ROWS,
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_backward_kernel(
    query,
    key,
    value,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    cos,
    signed_sin,
    heads,
    weight,
    out,
    num_rows,
    epsilon,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A row is one head of one token, values included."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    lane = tl.arange(0, HALF)[None, :]  # [1, HALF]
    mask = (row < num_rows) & (lane < HEAD_DIM // 2)
    token, head = row // (NUM_HEADS + 2 * NUM_KV_HEADS), row % (NUM_HEADS + 2 * NUM_KV_HEADS)
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    query_row = query + token * query_token_stride + head * query_head_stride
    key_row = key + token * key_token_stride + (head - NUM_HEADS) * key_head_stride
    value_row = value + token * value_token_stride + (head - NUM_HEADS - NUM_KV_HEADS) * value_head_stride
    source = tl.where(head < NUM_HEADS, query_row, tl.where(is_value, value_row, key_row)) + lane
    low = tl.load(source, mask, other=0.0)
    high = tl.load(source + HEAD_DIM // 2, mask, other=0.0)
    cosine = tl.load(cos + token * HEAD_DIM + lane, mask, other=0.0)
    sine = tl.load(signed_sin + token * HEAD_DIM + HEAD_DIM // 2 + lane, mask, other=0.0)
    # A rotation's transpose turns the other way.
    new_low = (rounded_product(low, cosine) + rounded_product(high, sine)).to(low.dtype)
    new_high = (rounded_product(high, cosine) - rounded_product(low, sine)).to(low.dtype)
    if NORM:
        rotated = mask & (head < NUM_HEADS + NUM_KV_HEADS)
        inputs = heads + row * HEAD_DIM + lane
        x_low = tl.load(inputs, rotated, other=0.0).to(tl.float32)
        x_high = tl.load(inputs + HEAD_DIM // 2, rotated, other=0.0).to(tl.float32)
        weights = weight + head * HEAD_DIM + lane
        inner_low = (new_low * tl.load(weights, rotated, other=0.0)).to(tl.float32)
        inner_high = (new_high * tl.load(weights + HEAD_DIM // 2, rotated, other=0.0)).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x_low * x_low + x_high * x_high, 1)[:, None] / HEAD_DIM + epsilon)
        unit_low, unit_high = x_low * scale, x_high * scale
        mean = tl.sum(inner_low * unit_low + inner_high * unit_high, 1)[:, None] / HEAD_DIM
        new_low = ((inner_low - unit_low * mean) * scale).to(low.dtype)
        new_high = ((inner_high - unit_high * mean) * scale).to(low.dtype)
    target = out + row * HEAD_DIM + lane
    tl.store(target, tl.where(is_value, low, new_low), mask)
    tl.store(target + HEAD_DIM // 2, tl.where(is_value, high, new_high), mask)


def rotate_heads_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    heads: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
) -> torch.Tensor:
    """From the gradients of rotated queries [tokens, heads, head_dim], rotated keys and values
    [tokens, kv_heads, head_dim], of any strides but the last, to that of ``heads``
    [tokens, heads + 2 * kv_heads, head_dim], from which ``rotate_heads`` made them."""
    num_tokens, num_heads, head_dim = query.shape
    query, key, value = (one if one.stride(-1) == 1 else one.contiguous() for one in (query, key, value))
    assert heads.is_contiguous()
    assert cos.is_contiguous()
    assert signed_sin.is_contiguous()
    out = torch.empty_like(heads)
    num_rows = num_tokens * heads.shape[1]
    _rotate_backward_kernel[(triton.cdiv(num_rows, _ROTATED_ROWS),)](
        query,
        key,
        value,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        cos,
        signed_sin,
        heads,
        weight,
        out,
        num_rows,
        epsilon,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=key.shape[1],
        HEAD_DIM=head_dim,
        HALF=triton.next_power_of_2(head_dim // 2),
        NORM=weight is not None,
        ROWS=_ROTATED_ROWS,
        num_warps=4,
    )
    return out


def _given(out: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    if out is None:
        return torch.empty_like(like)
    assert out.is_contiguous()
    return out
