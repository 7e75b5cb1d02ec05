"""``h = x @ a.T`` of a few rows' adapters, computed by programs of the launch that computes the base model's product of
the same ``x``."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cotenant.models.kernels.lora import Delta
from cotenant.models.kernels.overlap import wait_for_previous
from cotenant.models.lora_stacks import GroupAdapters

_PIECE = 8
_MAX_SPLITS = 4  # as ``load_h`` takes
_MIN_SPAN = 1024
# By ranks per turn: input features per turn, and how many turns are read ahead, plus one. Within the shared memory that
# a product's programs take.
_TURNS = {16: (256, 4), 32: (256, 3), 64: (128, 4)}


class Shrink(NamedTuple):
    """What a product's launch computes besides: ``num_programs`` programs that fill ``delta.sums``."""

    delta: Delta
    num_programs: int
    constants: dict[str, int]  # of the kernel


def plan_shrink(x: torch.Tensor, adapters: GroupAdapters) -> Shrink:
    """Room for ``x @ a.T`` of ``x`` [rows, in] as partial sums, and how the launch is to compute them."""
    num_rows, num_in = x.shape
    assert x.is_contiguous()
    ranks = 16 * triton.next_power_of_2(adapters.num_modules)
    depth, stages = _TURNS[ranks]
    while num_in % depth:
        depth //= 2
    assert depth >= 16, f"{num_in} input features are no multiple of 16"
    splits = min(_MAX_SPLITS, triton.cdiv(num_in, _MIN_SPAN))
    span = triton.cdiv(triton.cdiv(num_in, splits), depth) * depth
    splits = triton.cdiv(num_in, span)
    sums = torch.empty((splits, num_rows, adapters.width), dtype=torch.float32, device=x.device)
    constants = {
        "H_SPLITS": splits,
        "H_WIDTH": adapters.width,
        "H_MODULES": adapters.num_modules,
        "H_RANKS": ranks,
        "H_DEPTH": depth,
        "H_SPAN": span,
        "H_STAGES": stages,
        "H_PIECE": _PIECE,
        "H_ROWS": max(16, triton.next_power_of_2(num_rows)),
    }
    return Shrink(Delta(adapters, sums), splits * num_rows, constants)


NO_SHRINK = dict.fromkeys(
    ("H_SPLITS", "H_WIDTH", "H_MODULES", "H_RANKS", "H_DEPTH", "H_SPAN", "H_STAGES", "H_PIECE", "H_ROWS"), 0
)


def shrink_arguments(shrink: Shrink | None) -> tuple[object, ...]:
    """For the kernel: slots, ranks, stack, elements per slot, a's offset, h's partial sums."""
    if shrink is None:
        return None, None, None, 0, 0, None
    adapters, sums = shrink.delta
    return adapters.slots, adapters.ranks, adapters.stack, adapters.stack.stride(0), adapters.a_offset, sums


@triton.jit
def _find_piece(slots, ranks, index, num_rows, PIECE: tl.constexpr, ROWS: tl.constexpr):
    """Of piece number ``index`` its first row, how many rows it has, and its slot and rank. A piece is neighbouring
    rows of one adapter, cut where the row number is a multiple of ``PIECE``. There are at most as many as rows; beyond
    the last one there are 0 rows."""
    all_rows = tl.arange(0, ROWS)
    slot_of = tl.load(slots + all_rows, all_rows < num_rows, other=-1)
    rank_of = tl.load(ranks + all_rows, all_rows < num_rows, other=0)
    before = tl.load(slots + all_rows - 1, (all_rows % PIECE > 0) & (all_rows < num_rows), other=-2)
    begins = (slot_of >= 0) & (slot_of != before)
    chosen = begins & (tl.cumsum(begins.to(tl.int32), 0) - 1 == index)
    row = tl.sum(tl.where(chosen, all_rows, 0))
    slot = tl.max(tl.where(chosen, slot_of, -1))
    rank = tl.multiple_of(tl.sum(tl.where(chosen, rank_of, 0)), 16)
    others = (all_rows > row) & ((slot_of != slot) | (all_rows % PIECE == 0))
    length = tl.min(tl.where(others, all_rows, ROWS)) - row
    return row, tl.where(slot >= 0, length, 0), slot, rank


@triton.jit
def shrink_part(
    x,
    slots,
    ranks,
    stack,
    slot_stride,
    offset,
    sums,
    num_rows,
    num_in,
    program,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    MODULES: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPAN: tl.constexpr,
    STAGES: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """What ``SPAN`` input features give of a piece's ``h``: part ``program`` of ``num_rows * SPLITS``. Those of pieces
    that there are not come last, so they keep nobody waiting."""
    row, length, slot, rank = _find_piece(slots, ranks, program // SPLITS, num_rows, PIECE, ROWS)
    if length > 0:
        split = program % SPLITS
        lanes = tl.arange(0, PIECE)[None, :]
        a = stack + slot.to(tl.int64) * slot_stride + rank.to(tl.int64) * offset
        depth = tl.arange(0, DEPTH)
        stop = tl.minimum(split * SPAN + SPAN, num_in)
        wait_for_previous(OVERLAP)
        for first in range(0, MODULES * rank, RANKS):
            column = first + tl.arange(0, RANKS)[:, None]
            exists = column < MODULES * rank
            h = tl.zeros((RANKS, PIECE), tl.float32)
            for start in tl.range(split * SPAN, stop, DEPTH, num_stages=STAGES):
                matrix = tl.load(a + column * num_in + (start + depth)[None, :], exists, other=0.0)
                inputs = tl.load(x + (row + lanes) * num_in + (start + depth)[:, None], lanes < length, other=0.0)
                h = tl.dot(matrix, inputs, h)
            tl.store(sums + (split * num_rows + row + lanes) * WIDTH + column, h, exists & (lanes < length))
