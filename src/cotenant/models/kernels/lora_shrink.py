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
# Where the product leaves room for them from the beginning: so many of 64 rows find it at once.
_SPLITS_AT_ONCE = 2
# By ranks per turn: input features per turn, and how many turns are read ahead, plus one. In 64 KiB of shared memory:
# a product's programs take as much.
_TURNS = {16: (256, 4), 32: (256, 3), 64: (128, 4)}


class Shrink(NamedTuple):
    """What a product's launch computes besides: ``num_programs`` programs that fill ``delta.sums``."""

    delta: Delta
    num_programs: int
    constants: dict[str, int]  # of the kernel


def plan_shrink(x: torch.Tensor, adapters: GroupAdapters, *, all_at_once: bool) -> Shrink:
    """Room for ``x @ a.T`` of ``x`` [rows, in] as partial sums, and how the launch is to compute them. ``all_at_once``:
    beside all of the product's programs, where otherwise they fill what those leave idle at the end."""
    num_rows, num_in = x.shape
    assert x.is_contiguous()
    assert adapters.pieces is not None, "find_pieces comes first"
    ranks = 16 * triton.next_power_of_2(adapters.num_modules)
    depth, stages = _TURNS[ranks]
    while num_in % depth:
        depth //= 2
    assert depth >= 16, f"{num_in} input features are no multiple of 16"
    splits = min(_SPLITS_AT_ONCE if all_at_once else _MAX_SPLITS, triton.cdiv(num_in, _MIN_SPAN))
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
    }
    return Shrink(Delta(adapters, sums), splits * num_rows, constants)


NO_SHRINK = dict.fromkeys(
    ("H_SPLITS", "H_WIDTH", "H_MODULES", "H_RANKS", "H_DEPTH", "H_SPAN", "H_STAGES", "H_PIECE"), 0
)


def shrink_arguments(shrink: Shrink | None) -> tuple[object, ...]:
    """For the kernel: pieces, stack, elements per slot, a's offset, h's partial sums."""
    if shrink is None:
        return None, None, 0, 0, None
    adapters, sums = shrink.delta
    return adapters.pieces, adapters.stack, adapters.stack.stride(0), adapters.a_offset, sums


def find_pieces(slots: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
    """For rows with these adapters [rows, 4], int32: each piece's first row, number of rows, slot and rank. A piece is
    up to 8 neighbouring rows of one adapter, cut where the row number is a multiple of 8. There are at most as many as
    rows; beyond the last one there are 0 rows.

    Once per batch: a product's programs that shrink would each keep the memory waiting while they look for theirs.
    """
    num_rows = len(slots)
    pieces = torch.empty((num_rows, 4), dtype=torch.int32, device=slots.device)
    _find_pieces_kernel[(1,)](
        slots, ranks, pieces, num_rows, PIECE=_PIECE, ROWS=max(16, triton.next_power_of_2(num_rows)), num_warps=4
    )
    return pieces


@triton.jit(do_not_specialize=["num_rows"])
def _find_pieces_kernel(slots, ranks, pieces, num_rows, PIECE: tl.constexpr, ROWS: tl.constexpr):
    row = tl.arange(0, ROWS)
    exists = row < num_rows
    slot = tl.load(slots + row, exists, other=-1)
    rank = tl.load(ranks + row, exists, other=0)
    before = tl.load(slots + row - 1, exists & (row % PIECE > 0), other=-2)
    begins = (slot >= 0) & (slot != before)
    number = tl.cumsum(begins.to(tl.int32), 0) - 1
    other, other_slot = row[None, :], tl.load(slots + row, exists, other=-2)[None, :]
    ends = (other > row[:, None]) & ((other_slot != slot[:, None]) | (other % PIECE == 0))
    length = tl.min(tl.where(ends, other, ROWS), 1) - row
    place = pieces + 4 * number
    tl.store(place, row, begins)
    tl.store(place + 1, length, begins)
    tl.store(place + 2, slot, begins)
    tl.store(place + 3, rank, begins)
    tl.store(pieces + 4 * row + 1, 0, exists & (row >= tl.sum(begins.to(tl.int32), 0)))


@triton.jit
def shrink_part(
    x,
    pieces,
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
    OVERLAP: tl.constexpr,
):
    """What ``SPAN`` input features give of a piece's ``h``: part ``program`` of ``num_rows * SPLITS``. Those of pieces
    that there are not come last, so they keep nobody waiting."""
    piece = pieces + 4 * (program // SPLITS)
    row, length = tl.load(piece), tl.load(piece + 1)
    slot, rank = tl.load(piece + 2), tl.multiple_of(tl.load(piece + 3), 16)
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
