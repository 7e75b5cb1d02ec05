"""A matrix in bfloat16 in three quarters of its bytes, without loss, for decode steps, which are bound by reading it.

Of a weight's 16 bits, sign and fraction look like noise, and nearly all of the 8 bits of the exponent say the same: in
a normal distribution all but one in ten thousand weights have one of 16 neighbouring exponents (the idea of DFloat11,
Zhang et al. 2025; a fixed length instead of a Huffman code, so that a kernel finds each weight where it expects it).
Kept are 12 bits: a byte as it is, and four bits. The few others stand in a list.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# What a program of the kernel takes at once. Blocks lie one behind the other as it reads them.
BLOCK_COLUMNS = 128
BLOCK_DEPTH = 128
BLOCK_WARPS = 4  # whose threads a block is arranged for
BLOCK_BYTES = BLOCK_COLUMNS * BLOCK_DEPTH * 3 // 2
_NUM_EXPONENTS = 8  # pairs of neighbouring ones
# So many places are in a list, or twice, four times ... as many: 16 at least for each part that a product is cut into.
_MIN_LISTED = 64
MAX_SPLITS = 4
# With longer lists matrices stay as they are: of several thousand weights a kernel would read them no faster.
_MAX_LISTED = 1024
_ROWS_AT_ONCE = 8192  # counting takes eight bytes for each weight


class CompressedWeight(NamedTuple):
    """``blocks`` [out / 128, in / 128, bytes] and what is added to the four bits for the upper seven of an exponent.

    Weights with other exponents are 2**(2 * base - 127) there and stand in a list: in row i those of the columns
    128 * i to 128 * i + 127, each with 128 * its input feature plus its column's offset from 128 * i, and its value.
    They are dealt out evenly to four parts of a row; a place that has none is -1.
    """

    blocks: torch.Tensor  # uint8
    base: int
    places: torch.Tensor  # int32 [out / 128, listed]
    values: torch.Tensor  # bfloat16 [out / 128, listed]

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in (self.blocks, self.places, self.values))

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the matrix."""
        return self.blocks.shape[0] * BLOCK_COLUMNS, self.blocks.shape[1] * BLOCK_DEPTH


def is_compressible(num_out: int, num_in: int) -> bool:
    """Whether a matrix is of whole blocks."""
    return num_out % BLOCK_COLUMNS == 0 and num_in % BLOCK_DEPTH == 0


def compress(weight: torch.Tensor) -> CompressedWeight | None:
    """Of ``weight`` [out, in]; None where it is not bfloat16, not of whole blocks, or has many different exponents."""
    num_out, num_in = weight.shape
    if weight.dtype != torch.bfloat16 or not is_compressible(num_out, num_in):
        return None
    bits = weight.view(torch.int16)
    upper = ((bits >> 8) & 0x7F).to(torch.uint8)  # the exponent's upper seven bits
    base = _commonest(upper)
    listed = (upper < base) | (upper >= base + _NUM_EXPONENTS)
    columns, depths = listed.nonzero(as_tuple=True)
    counts = torch.bincount(columns // BLOCK_COLUMNS, minlength=num_out // BLOCK_COLUMNS)
    most = int(counts.max())
    if most > _MAX_LISTED:
        return None
    num_places = max(_MIN_LISTED, 1 << (most - 1).bit_length())
    lower = (bits & 0xFF).to(torch.uint8).masked_fill_(listed, 0)
    nibbles = (((bits >> 12) & 0x08).to(torch.uint8) | (upper - base)).masked_fill_(listed, 0)
    blocks = torch.empty(
        (num_out // BLOCK_COLUMNS, num_in // BLOCK_DEPTH, BLOCK_BYTES), dtype=torch.uint8, device=weight.device
    )
    num_bytes = BLOCK_COLUMNS * BLOCK_DEPTH
    blocks[:, :, :num_bytes].copy_(_arranged(lower).flatten(2))
    first, second = _arranged(nibbles).unbind(2)
    torch.bitwise_or(first, second << 4, out=blocks[:, :, num_bytes:])
    row = columns // BLOCK_COLUMNS
    number = torch.arange(len(columns), device=weight.device) - (counts.cumsum(0) - counts)[row]
    part_size = num_places // MAX_SPLITS
    at = (row, number % MAX_SPLITS * part_size + number // MAX_SPLITS)
    places = torch.full((len(counts), num_places), -1, dtype=torch.int32, device=weight.device)
    values = torch.zeros(places.shape, dtype=torch.bfloat16, device=weight.device)
    places[at] = (depths * BLOCK_COLUMNS + columns % BLOCK_COLUMNS).to(torch.int32)
    values[at] = weight[columns, depths]
    return CompressedWeight(blocks, base, places, values)


def decompress(compressed: CompressedWeight) -> torch.Tensor:
    """The matrix, bit for bit."""
    blocks, base, places, values = compressed
    num_bytes = BLOCK_COLUMNS * BLOCK_DEPTH
    lower = _as_matrix(blocks[:, :, :num_bytes].unflatten(2, (2, -1))).to(torch.int32)
    packed = blocks[:, :, num_bytes:]
    nibbles = _as_matrix(torch.stack([packed & 0x0F, packed >> 4], 2)).to(torch.int32)
    bits = ((nibbles & 8) << 12) | (((nibbles & 7) + base) << 8) | lower
    weight = (bits - ((bits & 0x8000) << 1)).to(torch.int16).view(torch.bfloat16)
    at = (places >= 0).nonzero(as_tuple=True)
    there = places[at]
    weight[at[0] * BLOCK_COLUMNS + there % BLOCK_COLUMNS, there // BLOCK_COLUMNS] = values[at]
    return weight


def _commonest(upper: torch.Tensor) -> int:
    """The first of the eight neighbouring values that most of ``upper`` [out, in] have."""
    parts = upper.split(_ROWS_AT_ONCE)
    counts = torch.stack([torch.bincount(part.flatten(), minlength=128) for part in parts]).sum(0).cumsum(0)
    before = torch.cat([counts.new_zeros(1), counts])
    return int((before[_NUM_EXPONENTS:] - before[:-_NUM_EXPONENTS]).argmax())


# A block's bytes lie as a warpgroup multiplies: what one of its threads needs for four products of 16 input features is
# together, 16 bytes. From the outside in: halves of 64 input features, of those halves of 32, halves of the columns,
# warps; of a warp's threads eight columns and four pairs of features; of a thread's bytes two times 16 features, two
# times 8, two times 8 columns, and the pair. As bits of a column c and a feature d: d6 | d5 | c6 | c5 c4 | c2 c1 c0 |
# d2 d1 | d4 | d3 | c3 | d0.
_BLOCK_ORDER = (0, 5, 6, 7, 1, 2, 4, 10, 8, 9, 3, 11)


def _arranged(values: torch.Tensor) -> torch.Tensor:
    """[out, in] -> [out / 128, in / 128, 2, 8192], in the order of a block."""
    num_out, num_in = values.shape
    # blocks of columns, c6, c5 c4, c3, c2 c1 c0; blocks of features, d6, d5, d4, d3, d2 d1, d0
    split = values.view(num_out // BLOCK_COLUMNS, 2, 4, 2, 8, num_in // BLOCK_DEPTH, 2, 2, 2, 2, 4, 2)
    return split.permute(_BLOCK_ORDER).reshape(num_out // BLOCK_COLUMNS, num_in // BLOCK_DEPTH, 2, -1)


def _as_matrix(arranged: torch.Tensor) -> torch.Tensor:
    """What ``_arranged`` was made from."""
    num_blocks, num_depths = arranged.shape[:2]
    split = arranged.reshape(num_blocks, num_depths, 2, 2, 2, 4, 8, 4, 2, 2, 2, 2)
    back = sorted(range(len(_BLOCK_ORDER)), key=_BLOCK_ORDER.__getitem__)
    return split.permute(back).reshape(num_blocks * BLOCK_COLUMNS, num_depths * BLOCK_DEPTH)
