"""The decoder's steps between its matrix products, one kernel each.

They round where transformers rounds, so that a step gives what the plain torch operations give: a norm is rounded to
the model's dtype before its weight is applied, and so is the sum that it is taken of.

What reads a product takes it unfinished too: then it adds up the product's partial sums, rounds, adds the adapters'
deltas ``h @ b.T``, and rounds again, as if the product had been finished before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cotenant.models.kernels.lora import Delta, load_h, load_sum
from cotenant.models.kernels.overlap import overlap, start_next, wait_for_previous
from cotenant.models.kernels.skinny import Unfinished

# With adapters: columns of each half and neighbouring rows per program of silu.
_DELTA_SILU_BLOCK = 256
_DELTA_SILU_ROWS = 8
# Columns of which norm reads 16 ranks of b at once.
_MOST_COLUMNS_AHEAD = 4096


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


def delta_arguments(delta: Delta | None) -> tuple[object, ...]:
    """For kernels: slots, ranks, stack, elements per slot, b's offset, h's partial sums, their number, h's columns."""
    if delta is None:
        return None, None, None, 0, 0, None, 0, 0
    adapters, sums = delta
    assert sums.shape[0] <= 4, "load_h adds up no more"
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
def _add_delta(value, up, b, mask, hidden, h, stride, rank, H_SPLITS: tl.constexpr, RANKS: tl.constexpr):
    """``value`` [columns] with its adapter's ``h @ b.T``; of b the first ``RANKS`` ranks have been read: ``up``."""
    down = load_h(h, stride, rank, H_SPLITS, RANKS).to(value.dtype)
    delta = tl.sum(down.to(tl.float32)[:, None] * up.to(tl.float32), 0)
    for first in range(RANKS, rank, RANKS):
        up = tl.load(b + first * hidden, mask[None, :], other=0.0)
        down = load_h(h + first, stride, rank - first, H_SPLITS, RANKS).to(value.dtype)
        delta += tl.sum(down.to(tl.float32)[:, None] * up.to(tl.float32), 0)
    return (value.to(tl.float32) + delta).to(value.dtype)


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
    RANKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    scales = tl.load(weight + columns, mask)
    if H_SPLITS > 0:
        slot, rank = tl.load(adapters + row), tl.multiple_of(tl.load(ranks + row), 16)
        b = stack + slot.to(tl.int64) * slot_stride + rank.to(tl.int64) * offset
        places = tl.arange(0, RANKS)[:, None] * hidden + columns[None, :]
        up = tl.load(b + places, mask[None, :] & (rank > 0), other=0.0)
    wait_for_previous(OVERLAP)
    value = load_sum(x + row * hidden + columns, num_rows * hidden, mask, SPLITS).to(out.dtype.element_ty)
    if H_SPLITS > 0:  # noqa: SIM102 - without adapters there is no rank
        if rank > 0:
            h, stride = h_sums + row * H_WIDTH, num_rows * H_WIDTH
            value = _add_delta(value, up, b + places, mask, hidden, h, stride, rank, H_SPLITS, RANKS)
    if ADD:
        value += tl.load(residual + row * hidden + columns, mask, other=0.0)
        tl.store(residual + row * hidden + columns, value, mask)
    start_next(OVERLAP)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / hidden + epsilon)
    normed = (wide * scale).to(value.dtype)
    tl.store(out + row * hidden + columns, normed * scales, mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """[rows, hidden] -> [rows, hidden]"""
    return _norm(x, None, weight, epsilon)


def add_rms_norm(
    x: torch.Tensor | Unfinished, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Add ``x`` to ``residual`` in place, both [rows, hidden], and return the norm of the sum."""
    return _norm(x, residual, weight, epsilon)


def _norm(
    product: torch.Tensor | Unfinished, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    x = Unfinished.of(product)
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
        *delta_arguments(x.delta),
        ADD=residual is not None,
        SPLITS=splits,
        BLOCK=block,
        # What is read ahead of the adapter stays in registers.
        RANKS=16 if block <= _MOST_COLUMNS_AHEAD else 4,
        num_warps=_warps(block),
        **overlap(out.device, isinstance(product, Unfinished)),
    )
    return out


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


@triton.jit
def _silu_times(gate, up):
    wide = gate.to(tl.float32)
    return (wide / (1.0 + tl.exp(-wide))).to(gate.dtype) * up


@triton.jit
def _silu_kernel(gate_up, out, width, SPLITS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    source = gate_up + row * 2 * width + columns
    stride = tl.num_programs(0) * 2 * width
    gate = load_sum(source, stride, mask, SPLITS).to(out.dtype.element_ty)
    up = load_sum(source + width, stride, mask, SPLITS).to(out.dtype.element_ty)
    start_next(OVERLAP)
    tl.store(out + row * width + columns, _silu_times(gate, up), mask)


@triton.jit(do_not_specialize=["num_rows"])
def _delta_silu_kernel(
    gate_up,
    out,
    num_rows,
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
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A block of columns of ``ROWS`` neighbouring rows, which read each of their adapters once."""
    first_row = tl.program_id(0) * ROWS
    # Columns by rows: tensor cores take as few as 8 rows on this side.
    lanes = tl.arange(0, ROWS)
    exist = first_row + lanes < num_rows
    slots = tl.load(adapters + first_row + lanes, exist, other=-1)
    row_ranks = tl.load(ranks + first_row + lanes, exist, other=0)
    # The rows with which an adapter comes up for the first time, numbered from 0.
    num_earlier = tl.sum(((slots[:, None] == slots[None, :]) & (lanes[:, None] > lanes[None, :])).to(tl.int32), 1)
    leads = (num_earlier == 0) & (row_ranks > 0)
    number = tl.cumsum(leads.to(tl.int32), 0) - 1
    rows = (first_row + lanes)[None, :].to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    within = columns < width
    mask = exist[None, :] & within
    wait_for_previous(OVERLAP)
    source = gate_up + rows * 2 * width + columns
    stride = num_rows.to(tl.int64) * 2 * width
    gate = load_sum(source, stride, mask, SPLITS).to(out.dtype.element_ty)
    up = load_sum(source + width, stride, mask, SPLITS).to(out.dtype.element_ty)
    inner = tl.arange(0, 16)
    places = inner[None, :] * (2 * width) + columns
    gate_delta = tl.zeros((BLOCK, ROWS), tl.float32)
    up_delta = tl.zeros((BLOCK, ROWS), tl.float32)
    for first in range(0, tl.max(row_ranks), 16):
        h = h_sums + rows * H_WIDTH + first + inner[:, None]
        gate_h = load_sum(h, num_rows * H_WIDTH, row_ranks[None, :] > first, H_SPLITS).to(gate.dtype)
        up_h = load_sum(h + row_ranks[None, :], num_rows * H_WIDTH, row_ranks[None, :] > first, H_SPLITS).to(gate.dtype)
        for index in tl.range(0, tl.sum(leads.to(tl.int32)), num_stages=STAGES):
            slot = tl.max(tl.where(leads & (number == index), slots, 0))
            rank = tl.multiple_of(tl.max(tl.where(leads & (number == index), row_ranks, 0)), 16)
            b = stack + slot.to(tl.int64) * slot_stride + rank.to(tl.int64) * offset + first * 2 * width
            gate_b = tl.load(b + places, within & (rank > first), other=0.0)
            up_b = tl.load(b + width + places, within & (rank > first), other=0.0)
            taken = (slots == slot)[None, :] & (rank > first)
            gate_more = tl.dot(gate_b, gate_h, gate_delta, input_precision="ieee")
            up_more = tl.dot(up_b, up_h, up_delta, input_precision="ieee")
            gate_delta = tl.where(taken, gate_more, gate_delta)
            up_delta = tl.where(taken, up_more, up_delta)
    start_next(OVERLAP)
    gate = (gate.to(tl.float32) + gate_delta).to(gate.dtype)
    up = (up.to(tl.float32) + up_delta).to(up.dtype)
    tl.store(out + rows * width + columns, _silu_times(gate, up), mask)


def silu_and_multiply(gate_up: torch.Tensor | Unfinished, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu of the left half times the right half: [rows, 2 * width] -> [rows, width], written to ``out`` if given."""
    sums, dtype, delta = Unfinished.of(gate_up)
    splits, num_rows, width = sums.shape[0], sums.shape[1], sums.shape[2] // 2
    if out is None:
        out = torch.empty((num_rows, width), dtype=dtype, device=sums.device)
    begin = overlap(out.device, isinstance(gate_up, Unfinished))
    if delta is None:
        block = 1024
        _silu_kernel[(num_rows, triton.cdiv(width, block))](
            sums, out, width, SPLITS=splits, BLOCK=block, num_warps=4, **begin
        )
        return out
    _delta_silu_kernel[(triton.cdiv(num_rows, _DELTA_SILU_ROWS), triton.cdiv(width, _DELTA_SILU_BLOCK))](
        sums,
        out,
        num_rows,
        width,
        *delta_arguments(delta),
        SPLITS=splits,
        BLOCK=_DELTA_SILU_BLOCK,
        ROWS=_DELTA_SILU_ROWS,
        STAGES=4,
        num_warps=4,
        maxnreg=128,  # so that all programs of an 8B model's batch of 64 run at once
        **begin,
    )
    return out
