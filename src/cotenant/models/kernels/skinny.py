"""The product of a few rows with a large matrix. It is bound by reading the matrix once, and libraries tuned for large
products read it more slowly.

Adapters ride along: the launch's last programs compute each row's ``x @ a.T``, beside the product's own where there is
room for all, else in what those leave idle at the end, and whatever kernel reads the product next adds ``h @ b.T``.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from cotenant.models.compressed import CompressedWeight
from cotenant.models.fused_linear import FusedLinear
from cotenant.models.kernels.compressed import NO_LIST, compressed_part, list_arguments, list_constants
from cotenant.models.kernels.lora import Delta
from cotenant.models.kernels.lora_shrink import NO_SHRINK, Shrink, plan_shrink, shrink_arguments, shrink_part
from cotenant.models.kernels.overlap import overlap, start_next, wait_for_previous
from cotenant.models.lora_stacks import GroupAdapters
from cotenant.models.skinny_tiling import (
    MAX_ROWS,
    CompressedTiling,
    Multiprocessors,
    Tiling,
    choose_compressed_tiling,
    choose_tiling,
    num_sms_at_hand,
)

# Up to this many rows a product is finished here; beyond, its parts would have to be added up by a launch of its own.
_MAX_FINISHED_ROWS = 32


class Unfinished(NamedTuple):
    """A product that the kernel that reads it completes: partial sums to be added up and rounded to ``dtype``, and what
    adapters add to that."""

    sums: torch.Tensor  # [splits, rows, out]; float32, or ``dtype`` where nothing is split
    dtype: torch.dtype
    delta: Delta | None = None

    @classmethod
    def of(cls, product: torch.Tensor | Unfinished) -> Unfinished:
        """``product`` itself, or a finished one [rows, out]."""
        return product if isinstance(product, Unfinished) else cls(product.unsqueeze(0), product.dtype)


def fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``skinny_product`` takes this product, and is meant for it."""
    return x.shape[0] <= _MAX_FINISHED_ROWS and _is_few_rows(x, weight) and _choose_tiling(x, weight) is not None


def fits_unfinished(x: torch.Tensor, base: FusedLinear) -> bool:
    """Whether ``unfinished_product`` takes this product, and is meant for it."""
    return _is_few_rows(x, base.weight) and (base.compressed is not None or _choose_tiling(x, base.weight) is not None)


def _is_few_rows(x: torch.Tensor, weight: torch.Tensor) -> bool:
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    return x.shape[0] <= MAX_ROWS and is_half and x.dtype == weight.dtype and x.is_contiguous()


def skinny_product(
    x: torch.Tensor,
    weight: torch.Tensor | CompressedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x @ weight.T + bias`` for x [rows, in] and weight [out, in] that ``fits``, or of up to 64 rows if ``weight`` is
    compressed; written to ``out`` if given. A row's result does not depend on the other rows, nor on how many there
    are."""
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    tiling = _tiling_of(x, weight, is_finished=True)
    assert tiling.splits == 1, "parts of a product have no room in a finished one"
    _launch(x, weight, bias, out, tiling, None)
    return out


def unfinished_product(x: torch.Tensor, base: FusedLinear, adapters: GroupAdapters | None) -> Unfinished:
    """The same with every row's adapter, if there are any, for what ``fits_unfinished``. Adapters do not change the
    product's own sums by a bit. From 33 rows on a row's bits differ from those of fewer rows, which are cut otherwise;
    those of a compressed matrix do not.
    """
    assert adapters is None or len(adapters.slots) == len(x), f"{len(adapters.slots)} slots for {len(x)} rows"
    weight = base.weight if base.compressed is None else base.compressed
    tiling, num_out = _tiling_of(x, weight), weight.shape[0]
    shape = (tiling.splits, x.shape[0], num_out)
    sums = torch.empty(shape, dtype=x.dtype if tiling.splits == 1 else torch.float32, device=x.device)
    shrink = None
    if adapters is not None:
        sms = multiprocessors(x.device)
        shrink = plan_shrink(x, adapters, all_at_once=tiling.runs_at_once(num_out, sms))
        tiling = tiling.leaving_room(num_out, sms)
    _launch(x, weight, base.bias, sums, tiling, shrink)
    return Unfinished(sums, x.dtype, None if shrink is None else shrink.delta)


def _tiling_of(
    x: torch.Tensor, weight: torch.Tensor | CompressedWeight, *, is_finished: bool = False
) -> Tiling | CompressedTiling:
    if isinstance(weight, CompressedWeight):
        sms = multiprocessors(x.device)
        return choose_compressed_tiling(x.shape[0], *weight.shape, sms, is_finished=is_finished)
    tiling = _choose_tiling(x, weight, is_finished=is_finished)
    assert tiling is not None
    return tiling


def _choose_tiling(x: torch.Tensor, weight: torch.Tensor, *, is_finished: bool = False) -> Tiling | None:
    num_out, num_in = weight.shape
    return choose_tiling(x.shape[0], num_out, num_in, multiprocessors(x.device), is_finished=is_finished)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor | CompressedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tiling: Tiling | CompressedTiling,
    shrink: Shrink | None,
) -> None:
    """Write the product to ``out`` [splits, rows, out], and what ``shrink`` is of."""
    (num_rows, num_in), num_out = x.shape, weight.shape[0]
    compressed = weight if isinstance(weight, CompressedWeight) else None
    matrix = weight if compressed is None else compressed.blocks
    num_programs = tiling.num_programs(num_out)
    x_tiles, tiles = None, None
    if isinstance(tiling, Tiling) and tiling.by_tma:
        x_tiles = TensorDescriptor.from_tensor(x, [tiling.rows, tiling.depth])
        tiles = TensorDescriptor.from_tensor(matrix, [tiling.columns, tiling.depth])
    _skinny_kernel[(num_programs + (0 if shrink is None else shrink.num_programs),)](
        x,
        matrix,
        x_tiles,
        tiles,
        x if bias is None else bias,
        out,
        num_rows,
        num_out,
        num_in,
        *list_arguments(compressed),
        *shrink_arguments(shrink),
        HAS_BIAS=bias is not None,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        DEPTH=tiling.depth,
        SPLITS=tiling.splits,
        **(NO_LIST if compressed is None else list_constants(compressed, tiling.rows, tiling.splits)),
        **(NO_SHRINK if shrink is None else shrink.constants),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **overlap(x.device),
    )


def multiprocessors(device: torch.device) -> Multiprocessors:
    """The device's, and how many of them are at hand."""
    every, num = _all_multiprocessors(device), num_sms_at_hand()
    return every if num is None else every._replace(num=num)


@cache
def _all_multiprocessors(device: torch.device) -> Multiprocessors:
    """A program may have 227 KiB of shared memory on Hopper, 99 on GPUs of compute capability 8.6 and 8.9."""
    index = torch.cuda.current_device() if device.index is None else device.index
    shared_bytes = int(driver.active.utils.get_device_properties(index)["max_shared_mem"])
    count = torch.cuda.get_device_properties(index).multi_processor_count
    return Multiprocessors(count, count, shared_bytes)


@triton.jit(do_not_specialize=["num_rows", "base"])
def _skinny_kernel(
    x,
    weight,
    x_tiles,
    tiles,
    bias,
    out,
    num_rows,
    num_out,
    num_in,
    base,
    places,
    values,
    pieces,
    stack,
    slot_stride,
    offset,
    h_sums,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    LISTED: tl.constexpr,
    TURNS: tl.constexpr,
    H_SPLITS: tl.constexpr,
    H_WIDTH: tl.constexpr,
    H_MODULES: tl.constexpr,
    H_RANKS: tl.constexpr,
    H_DEPTH: tl.constexpr,
    H_SPAN: tl.constexpr,
    H_STAGES: tl.constexpr,
    H_PIECE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    program = tl.program_id(0)
    num_programs = (num_out // COLUMNS) * SPLITS
    if H_SPLITS == 0 or program < num_programs:
        if LISTED == 0:
            wait_for_previous(OVERLAP)
            _product(
                x, weight, x_tiles, tiles, bias, out, num_rows, num_out, num_in, program, HAS_BIAS, ROWS, COLUMNS,
                DEPTH, SPLITS,
            )  # fmt: skip
        else:
            compressed_part(
                x, weight, bias, out, num_rows, num_out, num_in, base, places, values, program, HAS_BIAS, ROWS, SPLITS,
                LISTED, TURNS, OVERLAP,
            )  # fmt: skip
    else:
        shrink_part(
            x, pieces, stack, slot_stride, offset, h_sums, num_rows, num_in, program - num_programs, H_SPLITS,
            H_WIDTH, H_MODULES, H_RANKS, H_DEPTH, H_SPAN, H_STAGES, H_PIECE, OVERLAP,
        )  # fmt: skip


@triton.jit
def _product(
    x,
    weight,
    x_tiles,
    tiles,
    bias,
    out,
    num_rows,
    num_out,
    num_in,
    program,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """A block of columns of ``out``, or what a part of the input features gives of it. ``tiles``, ``x_tiles``: the
    matrix and the input as TMA reads them; None: by their addresses."""
    split = program % SPLITS
    first = (program // SPLITS) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    begin = tl.multiple_of(split * (num_in // SPLITS), DEPTH)
    depth = begin + tl.arange(0, DEPTH)
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for start in range(0, num_in // SPLITS, DEPTH):
        if tiles is not None:
            matrix = tiles.load([first, begin + start])
            inputs = x_tiles.load([0, begin + start]).T
        else:
            # Nobody reads the matrix again before the next step, so it need not displace what is read again.
            matrix = tl.load(
                weight + column[:, None].to(tl.int64) * num_in + (start + depth)[None, :],
                eviction_policy="evict_first",
            )
            inputs = tl.load(x + row[None, :] * num_in + (start + depth)[:, None], row[None, :] < num_rows, other=0.0)
        total = tl.dot(matrix, inputs, total)
    if HAS_BIAS:
        total += tl.load(bias + column, split == 0, other=0.0)[:, None].to(tl.float32)
    target = out + split * num_rows * num_out + row[None, :] * num_out + column[:, None]
    tl.store(target, total.to(out.dtype.element_ty), row[None, :] < num_rows)
