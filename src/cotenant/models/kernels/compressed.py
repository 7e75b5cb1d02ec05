"""What a program of ``skinny``'s kernel does with a compressed matrix: read in three quarters of its bytes, it is
decoded on the way to the tensor cores.

What ``compressed`` arranges is what a thread multiplies: it takes its bytes from shared memory 16 at a time and decodes
four weights with six instructions in registers. Weights that stand in a matrix's list are multiplied in the end, with
the inputs gathered for them, and what stands in their places is subtracted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cotenant.models.compressed import BLOCK_BYTES, BLOCK_COLUMNS, BLOCK_DEPTH, CompressedWeight
from cotenant.models.kernels.overlap import wait_for_previous

_BLOCK: tl.constexpr = tl.constexpr(BLOCK_BYTES)
_HALF: tl.constexpr = tl.constexpr(BLOCK_COLUMNS * BLOCK_DEPTH // 2)
_COLUMNS: tl.constexpr = tl.constexpr(BLOCK_COLUMNS)
_DEPTH: tl.constexpr = tl.constexpr(BLOCK_DEPTH)
_MAX_LISTED = 64  # at once
_MAX_REGISTERS = {16: 168, 32: 168, 64: 255}  # by rows: three programs find room on an SM, or one
# Four weights from a register of their lower bytes ($2), one with four bits of each in a byte's lower or upper half
# ($3), and the base in each of four bytes ($4): sign and exponent are put together for all four, then interleaved with
# the lower bytes.
_DECODING = """
{
    .reg .b32 signs, exponents, upper;
    %s
    and.b32 exponents, exponents, 0x07070707;
    lop3.b32 upper, signs, 0x80808080, exponents, 0xEA;
    add.u32 upper, upper, $4;
    prmt.b32 $0, $2, upper, 0x5140;
    prmt.b32 $1, $2, upper, 0x7362;
}
"""
_LOWER: tl.constexpr = tl.constexpr(_DECODING % "shl.b32 signs, $3, 4; mov.b32 exponents, $3;")
_UPPER: tl.constexpr = tl.constexpr(_DECODING % "mov.b32 signs, $3; shr.b32 exponents, $3, 4;")
NO_LIST = {"LISTED": 0, "TURNS": 0}  # of a matrix that is not compressed


def list_arguments(weight: CompressedWeight | None) -> tuple[object, ...]:
    """For the kernel: base, and the places and values of the list."""
    return (0, None, None) if weight is None else (weight.base, weight.places, weight.values)


def list_constants(weight: CompressedWeight, rows: int, splits: int) -> dict[str, int]:
    """For the kernel: how a program takes its part of the list, and how many registers its threads may have."""
    num_listed = weight.places.shape[1] // splits
    return {
        "LISTED": min(num_listed, _MAX_LISTED),
        "TURNS": max(1, num_listed // _MAX_LISTED),
        "maxnreg": _MAX_REGISTERS[rows],
    }


@triton.jit
def compressed_part(
    x, blocks, bias, out, num_rows, num_out, num_in, base, places, values, program,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, LISTED: tl.constexpr,
    TURNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """128 columns of ``out``, or what a part of the input features, and of the list, gives of them. A row's result does
    not depend on the other rows, nor on how many there are."""
    split, block = program % SPLITS, program // SPLITS
    column = tl.arange(0, _COLUMNS)
    row = tl.arange(0, ROWS)[None, :]
    exists = row < num_rows
    listed = program * TURNS * LISTED + tl.arange(0, LISTED)
    place, value = tl.load(places + listed), tl.load(values + listed)
    wait_for_previous(OVERLAP)
    num_depths = num_in // _DEPTH
    from_depth, to_depth = num_depths * split // SPLITS, num_depths * (split + 1) // SPLITS
    start = blocks + block.to(tl.int64) * num_depths * _BLOCK
    offset = tl.arange(0, _HALF)
    depth = tl.arange(0, _DEPTH // 2)[:, None]
    bases = tl.zeros((_HALF,), tl.uint8) + base.to(tl.uint8)
    total = tl.zeros((_COLUMNS, ROWS), tl.float32)
    for index in range(from_depth, to_depth):
        # Nobody reads the matrix again before the next step, so it need not displace what is read again.
        bytes_0 = tl.load(start + index * _BLOCK + offset, eviction_policy="evict_first")
        bytes_1 = tl.load(start + index * _BLOCK + _HALF + offset, eviction_policy="evict_first")
        nibbles = tl.load(start + index * _BLOCK + 2 * _HALF + offset, eviction_policy="evict_first")
        inputs = x + row * num_in + index * _DEPTH + depth
        inputs_0 = tl.load(inputs, exists, other=0.0)
        inputs_1 = tl.load(inputs + _DEPTH // 2, exists, other=0.0)
        total = tl.dot(_as_tile(_decode(bytes_0, nibbles, bases, _LOWER)), inputs_0, total)
        total = tl.dot(_as_tile(_decode(bytes_1, nibbles, bases, _UPPER)), inputs_1, total)
    total = _add_listed(total, x, place, value, base, row, exists, num_in)
    for turn in range(1, TURNS):
        more = listed + turn * LISTED
        total = _add_listed(total, x, tl.load(places + more), tl.load(values + more), base, row, exists, num_in)
    column += block * _COLUMNS
    if HAS_BIAS:
        total += tl.load(bias + column, split == 0, other=0.0)[:, None].to(tl.float32)
    target = out + split * num_rows * num_out + row * num_out + column[:, None]
    tl.store(target, total.to(out.dtype.element_ty), exists)


@triton.jit
def _add_listed(total, x, place, value, base, row, exists, num_in):
    """Each weight of the list instead of what stands in its place: by products with matrices of one weight a row."""
    is_there = place >= 0
    inputs = tl.load(x + row * num_in + (tl.maximum(place, 0) // _COLUMNS)[:, None], exists, other=0.0)
    column = tl.where(is_there, place % _COLUMNS, -1)
    is_at = tl.arange(0, _COLUMNS)[:, None] == column[None, :]
    total = tl.dot(tl.where(is_at, value[None, :], 0.0).to(inputs.dtype), inputs, total)
    stand_in = (base << 8).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.dot(tl.where(is_at, -stand_in, 0.0).to(inputs.dtype), inputs, total)


@triton.jit
def _decode(values, nibbles, bases, PTX: tl.constexpr):
    return tl.inline_asm_elementwise(
        PTX, "=r,=r,r,r,r", [values, nibbles, bases], dtype=tl.bfloat16, is_pure=True, pack=4
    )


@triton.jit
def _as_tile(weights):
    """Half a block [128 * 64], as it lies, to [128, 64]. That moves nothing: it names the order in which the tensor
    cores take them from the threads that hold them (``compressed``'s table)."""
    split = tl.reshape(weights, (2, 2, 4, 8, 4, 2, 2, 2, 2))  # d5, c6, c5 c4, c2 c1 c0, d2 d1, d4, d3, c3, d0
    return tl.reshape(tl.permute(split, (1, 2, 7, 3, 0, 5, 6, 4, 8)), (_COLUMNS, _DEPTH // 2))
