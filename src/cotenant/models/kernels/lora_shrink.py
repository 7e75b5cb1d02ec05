"""``h = x @ a.T`` of a few rows' adapters, computed beside the base model's product of the same ``x``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cotenant.models.kernels.lora import Delta
from cotenant.models.kernels.overlap import overlap, start_next, wait_for_previous
from cotenant.models.lora_stacks import GroupAdapters

_PIECE = 8
_MAX_SPLITS = 4  # as ``load_h`` takes
_MIN_SPAN = 1024


def _blocks(num_in: int, num_modules: int) -> tuple[int, int, int]:
    """(ranks per turn, input features per turn, input features per program). Two programs, or one with three modules,
    have room beside the product's on a Hopper multiprocessor."""
    ranks = 16 * triton.next_power_of_2(num_modules)
    depth = 128 if ranks == 16 else 64
    splits = min(_MAX_SPLITS, triton.cdiv(num_in, _MIN_SPAN))
    return ranks, depth, triton.cdiv(triton.cdiv(num_in, splits), depth) * depth


def shrink_beside(x: torch.Tensor, adapters: GroupAdapters) -> Delta:
    """``x @ a.T`` for ``x`` [rows, in], as partial sums. The launch before must be a product of ``x`` that lets this
    one run beside it, and its result must still be held: this kernel does not wait for it before it reads ``x`` and
    writes its own sums."""
    num_rows, num_in = x.shape
    ranks, depth, span = _blocks(num_in, adapters.num_modules)
    assert x.is_contiguous()
    assert num_in % depth == 0, f"{num_in} input features in turns of {depth}"
    splits = triton.cdiv(num_in, span)
    sums = torch.empty((splits, num_rows, adapters.width), dtype=torch.float32, device=x.device)
    _beside_kernel[(splits, num_rows)](
        x,
        adapters.slots,
        adapters.ranks,
        adapters.stack,
        adapters.stack.stride(0),
        adapters.a_offset,
        sums,
        num_rows,
        num_in,
        MODULES=adapters.num_modules,
        WIDTH=adapters.width,
        RANKS=ranks,
        DEPTH=depth,
        SPAN=span,
        PIECE=_PIECE,
        ROWS=max(16, triton.next_power_of_2(num_rows)),
        num_warps=4,
        num_stages=3,
        **overlap(x.device),
    )
    return Delta(adapters, sums)


@triton.jit(do_not_specialize=["num_rows"])
def _beside_kernel(
    x,
    slots,
    ranks,
    stack,
    slot_stride,
    offset,
    sums,
    num_rows,
    num_in,
    MODULES: tl.constexpr,
    WIDTH: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPAN: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A part of ``h`` of a piece: neighbouring rows of one adapter, cut where the row number is a multiple of
    ``PIECE``. There are at most as many as rows; the programs that have none come last, so they keep nobody waiting."""
    split, index = tl.program_id(0), tl.program_id(1)
    all_rows = tl.arange(0, ROWS)
    slot_of = tl.load(slots + all_rows, all_rows < num_rows, other=-1)
    rank_of = tl.load(ranks + all_rows, all_rows < num_rows, other=0)
    before = tl.load(slots + all_rows - 1, (all_rows % PIECE > 0) & (all_rows < num_rows), other=-2)
    begins = (slot_of >= 0) & (slot_of != before)
    number = tl.cumsum(begins.to(tl.int32), 0) - 1
    if index < tl.sum(begins.to(tl.int32)):
        row = tl.sum(tl.where(begins & (number == index), all_rows, 0))
        slot = tl.sum(tl.where(all_rows == row, slot_of, 0))
        rank = tl.multiple_of(tl.sum(tl.where(all_rows == row, rank_of, 0)), 16)
        others = (all_rows > row) & ((slot_of != slot) | (all_rows % PIECE == 0))
        length = tl.min(tl.where(others, all_rows, ROWS)) - row
        lanes = tl.arange(0, PIECE)[None, :]
        a = stack + slot.to(tl.int64) * slot_stride + rank.to(tl.int64) * offset
        depth = tl.arange(0, DEPTH)
        stop = tl.minimum(split * SPAN + SPAN, num_in)
        for first in range(0, MODULES * rank, RANKS):
            column = first + tl.arange(0, RANKS)[:, None]
            exists = column < MODULES * rank
            h = tl.zeros((RANKS, PIECE), tl.float32)
            for start in range(split * SPAN, stop, DEPTH):
                matrix = tl.load(a + column * num_in + (start + depth)[None, :], exists, other=0.0)
                inputs = tl.load(x + (row + lanes) * num_in + (start + depth)[:, None], lanes < length, other=0.0)
                h = tl.dot(matrix, inputs, h)
            tl.store(sums + (split * num_rows + row + lanes) * WIDTH + column, h, exists & (lanes < length))
    start_next(OVERLAP)
    # Not for its own sake: so that whoever waits for this kernel has waited for the product too.
    wait_for_previous(OVERLAP)
