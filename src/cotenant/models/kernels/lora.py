"""Every row's own LoRA adapter in two kernels: shrink (``h = x @ a.T``), then expand (``out += h @ b.T``).

They serve batches of many rows. With few rows, and so little work, the launches would cost more than what they do;
``lora_shrink`` then shrinks in the product's own launch, and the kernel that reads the product expands.

Neighbouring rows of one adapter form runs. A run is cut where the row number is a multiple of 16, and each piece reads
its adapter once (grouped gather as in Punica, Chen et al., section 4, and S-LoRA). The input features are split over
programs; their partial sums go to a workspace and expand adds them in a fixed order. So a row's result depends neither
on the other rows nor on their number, and nothing here depends on the data in shape.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cotenant.models.lora_stacks import GroupAdapters

# What tensor cores take at least: rows of a piece, and the ranks of one product.
PIECE = 16
_MAX_SPLITS = 16
# With fewer programs than this, reading is bound by latency and not by bandwidth.
_MIN_PROGRAMS = 1024


def shrink_blocks(num_in: int, num_modules: int) -> tuple[int, int, int]:
    """For inputs of ``num_in`` features: (features per product, features per program, ranks per product)."""
    block_in = min(256 if num_modules == 1 else 128, max(16, triton.next_power_of_2(num_in)))
    per_program = triton.cdiv(triton.cdiv(num_in, block_in), _MAX_SPLITS)
    return block_in, block_in * per_program, PIECE * triton.next_power_of_2(num_modules)


def expand_block(num_out: int) -> int:
    """Output features per program, for modules of ``num_out`` in all."""
    return 256 if num_out > 8192 else 128


def rows_per_program(num_rows: int, num_blocks: int) -> int:
    """How many rows a program looks after, of ``num_blocks`` programs for each row. Results do not depend on it."""
    rows = 1
    while rows < PIECE and num_rows * num_blocks >= 2 * rows * _MIN_PROGRAMS:
        rows *= 2
    return rows


def num_splits(num_in: int, num_modules: int) -> int:
    """Partial sums per element of ``h``."""
    return triton.cdiv(num_in, shrink_blocks(num_in, num_modules)[1])


class Delta(NamedTuple):
    """What adapters add to a product: ``h @ b.T``, where ``h`` is the sum of ``sums``, rounded to b's dtype."""

    adapters: GroupAdapters
    sums: torch.Tensor  # float32 [splits, rows, width]; of a row only its own adapter's modules * rank columns


def shrink(x: torch.Tensor, adapters: GroupAdapters) -> Delta:
    """``x @ a.T`` for ``x`` [rows, in], as partial sums."""
    assert x.stride(1) == 1, "the features of a row lie side by side"
    num_rows, num_in = x.shape
    block_in, per_program, block_ranks = shrink_blocks(num_in, adapters.num_modules)
    splits = num_splits(num_in, adapters.num_modules)
    sums = torch.empty((splits, num_rows, adapters.width), dtype=torch.float32, device=x.device)
    rows = rows_per_program(num_rows, splits)
    _shrink_kernel[(triton.cdiv(num_rows, rows), splits)](
        x,
        x.stride(0),
        adapters.slots,
        adapters.ranks,
        adapters.stack,
        adapters.stack.stride(0),
        adapters.a_offset,
        sums,
        num_rows,
        num_in,
        rows,
        MODULES=adapters.num_modules,
        WIDTH=adapters.width,
        PER_PROGRAM=per_program,
        BLOCK_IN=block_in,
        BLOCK_RANKS=block_ranks,
        PIECE=PIECE,
        num_warps=4,
        num_stages=3,
    )
    return Delta(adapters, sums)


def expand(out: torch.Tensor, delta: Delta) -> None:
    """Add ``delta`` to ``out`` [rows, sum of sizes], in place. At most three modules."""
    assert out.stride(1) == 1, "the features of a row lie side by side"
    adapters, sums = delta
    num_rows, num_out = out.shape
    block = expand_block(num_out)
    first, second, third = (*adapters.sizes, 0, 0)[:3]
    blocks = [triton.cdiv(size, block) for size in adapters.sizes]
    rows = rows_per_program(num_rows, sum(blocks))
    _expand_kernel[(triton.cdiv(num_rows, rows), sum(blocks))](
        out,
        out.stride(0),
        sums,
        adapters.slots,
        adapters.ranks,
        adapters.stack,
        adapters.stack.stride(0),
        adapters.b_offset,
        num_rows,
        rows,
        first,
        second,
        third,
        SPLITS=sums.shape[0],
        WIDTH=sums.shape[2],
        BLOCK_OUT=block,
        PIECE=PIECE,
        num_warps=4,
        num_stages=1,
    )


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def piece_at(slots, row, num_rows, PIECE: tl.constexpr):  # type: ignore[no-untyped-def,unused-ignore]
    """The slot of ``row``, and how many rows the piece has that begins there; 0 if none does."""
    slot = tl.load(slots + row)
    previous = tl.load(slots + row - 1, mask=row % PIECE != 0, other=-2)
    lanes = tl.arange(0, PIECE)
    in_reach = (lanes < PIECE - row % PIECE) & (row + lanes < num_rows)
    others = tl.load(slots + row + lanes, mask=in_reach, other=-2)
    length = tl.min(tl.where(others == slot, PIECE, lanes), axis=0)
    return slot, tl.where(slot == previous, 0, length)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def load_sum(source, stride, mask, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def,unused-ignore]
    """The sum of ``SPLITS`` loads, ``stride`` elements apart."""
    total = tl.load(source, mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(source + split * stride, mask, other=0.0)
    return total


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def load_h(sums, stride, rank, SPLITS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def,unused-ignore]
    """The first columns of one row of ``h``, zeros from ``rank`` on. Each is read once, not once per thread.
    ``stride``: from one partial sum, of at most 4, to the next."""
    split, column = tl.arange(0, 4)[:, None], tl.arange(0, COLUMNS)[None, :]
    return tl.sum(tl.load(sums + split * stride + column, (split < SPLITS) & (column < rank), other=0.0), 0)


@triton.jit(do_not_specialize=["num_rows", "rows"])  # type: ignore[untyped-decorator,unused-ignore]
def _shrink_kernel(  # type: ignore[no-untyped-def,unused-ignore]
    x,
    x_stride,
    slots,
    ranks,
    stack,
    slot_stride,
    offset,
    sums,
    num_rows,
    num_in,
    rows,
    MODULES: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    PIECE: tl.constexpr,
):
    lanes = tl.arange(0, PIECE)
    inner = tl.arange(0, BLOCK_IN)
    split = tl.program_id(1)
    start = tl.program_id(0) * rows
    for row in range(start, tl.minimum(start + rows, num_rows)):
        slot, length = piece_at(slots, row, num_rows, PIECE)
        if (slot >= 0) & (length > 0):
            rank = tl.multiple_of(tl.load(ranks + row), 16)
            a = stack + slot.to(tl.int64) * slot_stride + rank.to(tl.int64) * offset
            inputs = x + (row + lanes).to(tl.int64)[:, None] * x_stride
            total = (split * num_rows + row + lanes).to(tl.int64)[:, None] * WIDTH
            for first in range(0, MODULES * rank, BLOCK_RANKS):
                columns = first + tl.arange(0, BLOCK_RANKS)
                h = tl.zeros((PIECE, BLOCK_RANKS), tl.float32)
                for step in range(0, PER_PROGRAM, BLOCK_IN):
                    depth = split * PER_PROGRAM + step + inner
                    tile = tl.load(
                        inputs + depth[None, :], mask=(lanes[:, None] < length) & (depth[None, :] < num_in), other=0.0
                    )
                    matrix = tl.load(
                        a + columns[:, None] * num_in + depth[None, :],
                        mask=(columns[:, None] < MODULES * rank) & (depth[None, :] < num_in),
                        other=0.0,
                    )
                    h = tl.dot(tile, tl.trans(matrix), h, input_precision="ieee")
                tl.store(
                    sums + total + columns[None, :],
                    h,
                    mask=(lanes[:, None] < length) & (columns[None, :] < MODULES * rank),
                )


@triton.jit(do_not_specialize=["num_rows", "rows"])  # type: ignore[untyped-decorator,unused-ignore]
def _expand_kernel(  # type: ignore[no-untyped-def,unused-ignore]
    out,
    out_stride,
    sums,
    slots,
    ranks,
    stack,
    slot_stride,
    offset,
    num_rows,
    rows,
    first_size,
    second_size,
    third_size,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    PIECE: tl.constexpr,
):
    lanes = tl.arange(0, PIECE)
    num_out = first_size + second_size + third_size
    # Blocks of columns do not cross from one module into the next.
    block = tl.program_id(1)
    first_blocks, second_blocks = tl.cdiv(first_size, BLOCK_OUT), tl.cdiv(second_size, BLOCK_OUT)
    module = 0
    module_start = 0
    module_end = first_size
    if block >= first_blocks + second_blocks:
        block -= first_blocks + second_blocks
        module = 2
        module_start = first_size + second_size
        module_end = module_start + third_size
    elif block >= first_blocks:
        block -= first_blocks
        module = 1
        module_start = first_size
        module_end = first_size + second_size
    columns = module_start + block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    start = tl.program_id(0) * rows
    for row in range(start, tl.minimum(start + rows, num_rows)):
        slot, length = piece_at(slots, row, num_rows, PIECE)
        if (slot >= 0) & (length > 0):
            rank = tl.multiple_of(tl.load(ranks + row), 16)
            b = stack + slot.to(tl.int64) * slot_stride + rank.to(tl.int64) * offset
            target = out + (row + lanes).to(tl.int64)[:, None] * out_stride + columns[None, :]
            inside = (lanes[:, None] < length) & (columns[None, :] < module_end)
            base = tl.load(target, mask=inside, other=0.0)
            delta = tl.zeros((PIECE, BLOCK_OUT), tl.float32)
            for first in range(0, rank, 16):
                inner = first + tl.arange(0, 16)
                matrix = tl.load(
                    b + inner[:, None].to(tl.int64) * num_out + columns[None, :],
                    mask=columns[None, :] < module_end,
                    other=0.0,
                )
                part = sums + (row + lanes).to(tl.int64)[:, None] * WIDTH + (module * rank + inner)[None, :]
                h = tl.zeros((PIECE, 16), tl.float32)
                for split in range(SPLITS):
                    h += tl.load(part + split * num_rows * WIDTH, mask=lanes[:, None] < length, other=0.0)
                delta = tl.dot(h.to(matrix.dtype), matrix, delta, input_precision="ieee")
            tl.store(target, (base.to(tl.float32) + delta).to(base.dtype), mask=inside)
