"""A matrix in bfloat16 in three quarters of its bytes, without loss, for decode steps, which are bound by reading it.

Of a weight's 16 bits, sign and fraction look like noise, and nearly all of the 8 bits of the exponent say the same: in
a normal distribution all but one in ten thousand weights have one of 16 neighbouring exponents (the idea of DFloat11,
Zhang et al. 2025; a fixed length instead of a Huffman code, so that a kernel finds each weight where it expects it).
Kept are 12 bits: a byte as it is, and four bits. The few others stand in lists.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# What the kernel (kernels/compressed_product.cu) takes at once. Blocks lie one behind the other as it reads them: lower
# bytes, four bits of each weight, and a list: where those of each of eight groups (below) begin and end, two bytes, and
# four bytes for each listed weight.
BLOCK_COLUMNS = 128
BLOCK_DEPTH = 64
_LOWER_BYTES = BLOCK_COLUMNS * BLOCK_DEPTH
_CODE_BYTES = _LOWER_BYTES // 2
_NUM_EXPONENTS = 8  # pairs of neighbouring ones
# A list takes a multiple of 16 bytes. With longer ones, in any block or on average, matrices stay as they are: the
# kernel puts listed weights in their places one by one.
_NUM_GROUPS, _BOUNDS_BYTES = 8, 16
_LIST_STEP = 16
MAX_LIST_BYTES = 256
_MOST_ON_AVERAGE = 6
_ROWS_AT_ONCE = 8192  # counting takes eight bytes for each weight


class CompressedWeight(NamedTuple):
    """``blocks`` [out / 128, in / 64, bytes] and what is added to three of the four bits for the upper seven of an
    exponent; the fourth is the sign. Weights with other exponents stand in the block's list."""

    blocks: torch.Tensor  # uint8
    base: int

    @property
    def num_bytes(self) -> int:
        return self.blocks.nbytes

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
    is_listed = (upper < base) | (upper >= base + _NUM_EXPONENTS)
    lists = _lists(weight, is_listed)
    if lists is None:
        return None
    lower = (bits & 0xFF).to(torch.uint8).masked_fill_(is_listed, 0)
    codes = (((bits >> 12) & 0x08).to(torch.uint8) | (upper - base)).masked_fill_(is_listed, 0)
    shape = (num_out // BLOCK_COLUMNS, num_in // BLOCK_DEPTH, _LOWER_BYTES + _CODE_BYTES + lists.shape[2])
    blocks = torch.empty(shape, dtype=torch.uint8, device=weight.device)
    of_lower, of_codes, of_list = _parts(blocks)
    of_lower.copy_(_arranged(lower).flatten(2))
    of_codes.copy_(_paired(_arranged(codes)))
    of_list.copy_(lists)
    return CompressedWeight(blocks, base)


def _parts(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lower bytes, codes, lists."""
    lists_at = _LOWER_BYTES + _CODE_BYTES
    return blocks[:, :, :_LOWER_BYTES], blocks[:, :, _LOWER_BYTES:lists_at], blocks[:, :, lists_at:]


def _lists(weight: torch.Tensor, is_listed: torch.Tensor) -> torch.Tensor | None:
    """[out / 128, in / 64, bytes]. None: they would be too long."""
    num_out, num_in = weight.shape
    num_blocks = (num_out // BLOCK_COLUMNS) * (num_in // BLOCK_DEPTH)
    columns, depths = is_listed.nonzero(as_tuple=True)
    block = columns // BLOCK_COLUMNS * (num_in // BLOCK_DEPTH) + depths // BLOCK_DEPTH
    group, place = _place_of(columns % BLOCK_COLUMNS, depths % BLOCK_DEPTH)
    ends = torch.bincount(block * _NUM_GROUPS + group, minlength=num_blocks * _NUM_GROUPS)
    ends = ends.view(num_blocks, _NUM_GROUPS).cumsum(1)
    num_bytes = -(-(_BOUNDS_BYTES + 4 * int(ends.max())) // _LIST_STEP) * _LIST_STEP
    if num_bytes > MAX_LIST_BYTES or len(block) > _MOST_ON_AVERAGE * num_blocks:
        return None
    order = torch.argsort(block * _NUM_GROUPS + group, stable=True)
    columns, depths, block, place = (each[order] for each in (columns, depths, block, place))
    before = ends[:, -1].cumsum(0) - ends[:, -1]
    number = torch.arange(len(block), device=weight.device) - before[block]
    lists = torch.zeros((num_blocks, num_bytes // 4), dtype=torch.int32, device=weight.device)
    values = weight[columns, depths].view(torch.int16).to(torch.int32) << 16
    lists[block, _BOUNDS_BYTES // 4 + number] = values | place.to(torch.int32)
    lists = lists.view(torch.uint8)
    begins = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], 1)
    lists[:, :_BOUNDS_BYTES] = torch.stack([begins, ends], 2).flatten(1).to(torch.uint8)
    return lists.view(num_out // BLOCK_COLUMNS, num_in // BLOCK_DEPTH, num_bytes)


def decompress(compressed: CompressedWeight) -> torch.Tensor:
    """The matrix, bit for bit."""
    lower, codes, lists = _parts(compressed.blocks)
    lower = _as_matrix(lower).to(torch.int32)
    codes = _as_matrix(_unpaired(codes)).to(torch.int32)
    bits = ((codes & 8) << 12) | (((codes & 7) + compressed.base) << 8) | lower
    weight = (bits - ((bits & 0x8000) << 1)).to(torch.int16).view(torch.bfloat16)
    ends, entries = lists[:, :, 1:_BOUNDS_BYTES:2].to(torch.int64), lists[:, :, _BOUNDS_BYTES:].contiguous()
    entries = entries.view(torch.int32)
    numbers = torch.arange(entries.shape[2], device=weight.device)
    row, block, number = (numbers < ends[:, :, -1:]).nonzero(as_tuple=True)
    entry, group = entries[row, block, number], (ends[row, block] <= number[:, None]).sum(1)
    columns, depths = _weight_at(group, entry)
    weight[row * BLOCK_COLUMNS + columns, block * BLOCK_DEPTH + depths] = (
        (entry >> 16).to(torch.int16).view(torch.bfloat16)
    )
    return weight


def _commonest(upper: torch.Tensor) -> int:
    """The first of the eight neighbouring values that most of ``upper`` [out, in] have."""
    parts = upper.split(_ROWS_AT_ONCE)
    counts = torch.stack([torch.bincount(part.flatten(), minlength=128) for part in parts]).sum(0).cumsum(0)
    before = torch.cat([counts.new_zeros(1), counts])
    return int((before[_NUM_EXPONENTS:] - before[:-_NUM_EXPONENTS]).argmax())


# A block's bytes lie as four warps multiply: what a thread needs for two products of 16 input features is together, 16
# bytes. From the outside in: halves of 32 input features, halves of the columns, warps; of a warp's threads eight
# columns and four pairs of features; of a thread's bytes two times 16 features, two times 8, two times 8 columns, and
# the pair. As bits of a column c and a feature d: d5 | c6 | c5 c4 | c2 c1 c0 | d2 d1 | d4 | d3 | c3 | d0.
_BLOCK_ORDER = (0, 5, 6, 1, 2, 4, 9, 7, 8, 3, 10)


def _arranged(values: torch.Tensor) -> torch.Tensor:
    """[out, in] -> [out / 128, in / 64, 2, 2, 2048], in a block's order: halves of features, of columns, places."""
    num_out, num_in = values.shape
    # blocks of columns, c6, c5 c4, c3, c2 c1 c0; blocks of features, d5, d4, d3, d2 d1, d0
    split = values.view(num_out // BLOCK_COLUMNS, 2, 4, 2, 8, num_in // BLOCK_DEPTH, 2, 2, 2, 4, 2)
    arranged = split.permute(_BLOCK_ORDER)
    return arranged.reshape(num_out // BLOCK_COLUMNS, num_in // BLOCK_DEPTH, 2, 2, -1)


def _as_matrix(arranged: torch.Tensor) -> torch.Tensor:
    """What ``_arranged`` was made from."""
    num_blocks, num_depths = arranged.shape[:2]
    split = arranged.reshape(num_blocks, num_depths, 2, 2, 4, 8, 4, 2, 2, 2, 2)
    back = sorted(range(len(_BLOCK_ORDER)), key=_BLOCK_ORDER.__getitem__)
    return split.permute(back).reshape(num_blocks * BLOCK_COLUMNS, num_depths * BLOCK_DEPTH)


# A byte has the codes of two weights, of a column of the first half and of one of the second. Sign and exponent are
# where they are wanted, at the ends of a byte, for the first; for the second they are if four bytes, as one number, are
# turned right by four bits: so its sign is in the byte after its own.
def _paired(codes: torch.Tensor) -> torch.Tensor:
    """[blocks, blocks, 2, 2, 2048] of four bits, the sign first, -> [blocks, blocks, 4096]."""
    first, second = codes.unbind(3)
    signs = (second & 8).view(*second.shape[:-1], -1, 4).roll(1, -1).view_as(second)
    return ((first & 7) | ((first & 8) << 4) | ((second & 7) << 4) | signs).flatten(2)


def _unpaired(packed: torch.Tensor) -> torch.Tensor:
    """What ``_paired`` was made from."""
    packed = packed.reshape(*packed.shape[:2], 2, -1)
    signs = (packed & 8).view(*packed.shape[:-1], -1, 4).roll(-1, -1).view_as(packed)
    return torch.stack([(packed & 7) | ((packed >> 4) & 8), ((packed >> 4) & 7) | signs], 3)


# A group is of a warp and half of the features. An entry has the value's 16 bits and which of the thread's weights of
# the half it is, d4 c6 d3 c3 d0, and which thread, c2 c1 c0 d2 d1.
def _place_of(column: torch.Tensor, depth: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The group, and what an entry says, of weights in their blocks."""
    group = column // 16 % 4 * 2 + depth // 32
    weight = depth // 16 % 2 * 16 + column // 64 * 8 + depth // 8 % 2 * 4 + column // 8 % 2 * 2 + depth % 2
    return group, weight * 32 + column % 8 * 4 + depth // 2 % 4


def _weight_at(group: torch.Tensor, entry: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Column and input feature, in their block, of what ``_place_of`` was asked of."""
    bits = [entry >> place & 1 for place in range(10)]
    d1, d2, c0, c1, c2, d0, c3, d3, c6, d4 = bits
    column = c6 * 64 + group // 2 * 16 + c3 * 8 + c2 * 4 + c1 * 2 + c0
    return column, group % 2 * 32 + d4 * 16 + d3 * 8 + d2 * 4 + d1 * 2 + d0
