"""The product of a few rows with a large matrix. It is bound by reading the matrix once, and libraries tuned for large
products read it more slowly.

Adapters ride along: programs of the same launch compute each row's ``x @ a.T``, and whatever kernel reads the product
next adds ``h @ b.T``. So adapters cost the bytes of their matrices and no launches of their own.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from cotenant.models.kernels.lora import Delta
from cotenant.models.lora_stacks import GroupAdapters

MAX_ROWS = 64
# Up to this many rows a product without adapters is faster here than by the library.
MAX_PLAIN_ROWS = 32
# Input features per turn of an adapter's program, and the most that one program goes through.
_ADAPTER_DEPTH = 128
_ADAPTER_SPAN = 2048
_MAX_ADAPTER_SPLITS = 4
# Two programs fit on a multiprocessor, so that adapters' programs run beside the product's.
_SHARED_BYTES = 96 * 1024
# The most programs that a product is split into: two on each multiprocessor of a Hopper GPU.
_MAX_SPLIT_PROGRAMS = 264
_MIN_SPLIT_DEPTH = 512


class Tiling(NamedTuple):
    """How a product is cut: ``rows`` of the input at once, ``columns`` of the output per program, ``depth`` input
    features per turn, and the input features over ``splits`` programs."""

    rows: int
    columns: int
    depth: int
    splits: int
    num_warps: int
    num_stages: int


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


def choose_tiling(num_rows: int, num_out: int, num_in: int, with_adapters: bool = False) -> Tiling | None:
    """None for a matrix that is not cut evenly."""
    rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else MAX_ROWS
    if rows == MAX_ROWS or with_adapters:
        return _choose_split_tiling(rows, num_out, num_in)
    if num_out <= 4096 and num_out % 32 == 0 and num_in % 256 == 0:
        return Tiling(rows, 32, 256, 1, 4, 5)
    if num_out % 64 == 0 and num_in % 128 == 0:
        return Tiling(rows, 64, 128, 1, 4, 5 if num_out <= 8192 else 4)
    return None


def _choose_split_tiling(rows: int, num_out: int, num_in: int) -> Tiling | None:
    """Small enough for two programs on a multiprocessor, so that adapters' programs run beside the product's; the input
    is split where there would be fewer programs than that."""
    if num_out % 64 or num_in % 128:
        return None
    splits = 1
    while (
        2 * splits * (num_out // 64) <= _MAX_SPLIT_PROGRAMS
        and num_in % (2 * 128 * splits) == 0
        and num_in // (2 * splits) >= _MIN_SPLIT_DEPTH
    ):
        splits *= 2
    return Tiling(rows, 64, 128, splits, 4, 3)


def adapter_blocks(num_rows: int, num_in: int, num_modules: int) -> tuple[int, int, int]:
    """(ranks per program, input features per program, stages) for tiles of ``num_rows``."""
    ranks = 16 * triton.next_power_of_2(num_modules)
    splits = min(_MAX_ADAPTER_SPLITS, triton.cdiv(num_in, _ADAPTER_SPAN))
    span = triton.cdiv(triton.cdiv(num_in, splits), _ADAPTER_DEPTH) * _ADAPTER_DEPTH
    stage_bytes = (num_rows + ranks) * _ADAPTER_DEPTH * 2
    return ranks, span, min(6, _SHARED_BYTES // stage_bytes)


def fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``skinny_product`` takes this product, and is meant for it."""
    return x.shape[0] <= MAX_PLAIN_ROWS and fits_unfinished(x, weight)


def fits_unfinished(x: torch.Tensor, weight: torch.Tensor, with_adapters: bool = False) -> bool:
    """Whether ``unfinished_product`` takes this product, and is meant for it."""
    return (
        x.shape[0] <= MAX_ROWS
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.dtype == weight.dtype
        and x.is_contiguous()
        and choose_tiling(x.shape[0], weight.shape[0], weight.shape[1], with_adapters) is not None
    )


def skinny_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``x @ weight.T + bias`` for x [rows, in] and weight [out, in] that ``fits``.

    A row's result does not depend on the other rows, nor on how many there are up to 32, nor from there up to 64.
    """
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    launch(x, weight, bias, out, _tiling_of(x, weight), None)
    return out


def unfinished_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, adapters: GroupAdapters | None
) -> Unfinished:
    """The same with every row's adapter, if there are any, for what ``fits_unfinished``. Adapters do not change the
    product's own sums by a bit."""
    assert adapters is None or len(adapters.slots) == len(x), f"{len(adapters.slots)} slots for {len(x)} rows"
    tiling = _tiling_of(x, weight, adapters is not None)
    shape = (tiling.splits, x.shape[0], weight.shape[0])
    sums = torch.empty(shape, dtype=x.dtype if tiling.splits == 1 else torch.float32, device=x.device)
    return Unfinished(sums, x.dtype, launch(x, weight, bias, sums, tiling, adapters))


def _tiling_of(x: torch.Tensor, weight: torch.Tensor, with_adapters: bool = False) -> Tiling:
    tiling = choose_tiling(x.shape[0], weight.shape[0], weight.shape[1], with_adapters)
    assert tiling is not None
    return tiling


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tiling: Tiling,
    adapters: GroupAdapters | None,
) -> Delta | None:
    """Write the product to ``out`` [splits, rows, out], and return what the adapters add to it."""
    (num_rows, num_in), num_out = x.shape, weight.shape[0]
    num_programs = num_out // tiling.columns * tiling.splits
    stage_bytes = (tiling.rows + tiling.columns) * tiling.depth * x.element_size()
    ranks, span, stages, delta = 16, num_in, 1, None
    if adapters is not None:
        ranks, span, stages = adapter_blocks(tiling.rows, num_in, adapters.num_modules)
        splits = triton.cdiv(num_in, span)
        sums = torch.empty((splits, num_rows, adapters.width), dtype=torch.float32, device=x.device)
        num_programs += num_rows * splits
        delta = Delta(adapters, sums)
    _skinny_kernel[(num_programs,)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        None if adapters is None else adapters.slots,
        None if adapters is None else adapters.ranks,
        None if adapters is None else adapters.stack,
        0 if adapters is None else adapters.stack.stride(0),
        0 if adapters is None else adapters.a_offset,
        None if delta is None else delta.sums,
        num_rows,
        num_out,
        num_in,
        HAS_BIAS=bias is not None,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        DEPTH=tiling.depth,
        SPLITS=tiling.splits,
        MODULES=0 if adapters is None else adapters.num_modules,
        WIDTH=0 if adapters is None else adapters.width,
        ADAPTER_RANKS=ranks,
        ADAPTER_DEPTH=_ADAPTER_DEPTH,
        ADAPTER_SPAN=span,
        ADAPTER_STAGES=stages,
        num_warps=tiling.num_warps,
        num_stages=max(1, min(tiling.num_stages, _shared_bytes(x.device) // stage_bytes)),
    )
    return delta


@cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may take: 227 KiB on Hopper, 99 on GPUs of compute capability 8.6 and 8.9."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


@triton.jit
def _multiply(
    program,
    x,
    weight,
    bias,
    out,
    num_rows,
    num_out,
    num_in,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
):
    split = program % SPLITS
    column = (program // SPLITS) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    depth = tl.multiple_of(split * (num_in // SPLITS), DEPTH) + tl.arange(0, DEPTH)
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for start in range(0, num_in // SPLITS, DEPTH):
        # Nobody reads the matrix again before the next step, so it need not displace what is read again.
        matrix = tl.load(
            weight + column[:, None].to(tl.int64) * num_in + (start + depth)[None, :], eviction_policy="evict_first"
        )
        inputs = tl.load(x + row[None, :] * num_in + (start + depth)[:, None], row[None, :] < num_rows, other=0.0)
        total = tl.dot(matrix, inputs, total)
    if HAS_BIAS:
        total += tl.load(bias + column, split == 0, other=0.0)[:, None].to(tl.float32)
    target = out + split * num_rows * num_out + row[None, :] * num_out + column[:, None]
    tl.store(target, total.to(out.dtype.element_ty), row[None, :] < num_rows)


@triton.jit
def _shrink(
    program,
    x,
    slots,
    ranks,
    stack,
    slot_stride,
    offset,
    sums,
    num_rows,
    num_in,
    ROWS: tl.constexpr,
    MODULES: tl.constexpr,
    WIDTH: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPAN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A part of ``x @ a.T`` for all rows of one adapter, by the program of the first of them."""
    first_row = program % num_rows
    split = program // num_rows
    slot = tl.load(slots + first_row)
    if slot >= 0:
        rank = tl.multiple_of(tl.load(ranks + slot), 16)
        row = tl.arange(0, ROWS)
        taken = tl.load(slots + row, row < num_rows, other=-1) == slot
        num_earlier = tl.sum((taken & (row < first_row)).to(tl.int32), 0)
        if num_earlier == 0:
            a = stack + slot.to(tl.int64) * slot_stride + rank.to(tl.int64) * offset
            depth = tl.arange(0, DEPTH)
            for first_rank in range(0, MODULES * rank, RANKS):
                column = first_rank + tl.arange(0, RANKS)
                exists = column < MODULES * rank
                h = tl.zeros((RANKS, ROWS), tl.float32)
                for start in tl.range(split * SPAN, tl.minimum(split * SPAN + SPAN, num_in), DEPTH, num_stages=STAGES):
                    matrix = tl.load(
                        a + column[:, None] * num_in + (start + depth)[None, :], exists[:, None], other=0.0
                    )
                    inputs = tl.load(x + row[None, :] * num_in + (start + depth)[:, None], taken[None, :], other=0.0)
                    h = tl.dot(matrix, inputs, h)
                target = sums + (split * num_rows + row)[None, :] * WIDTH + column[:, None]
                tl.store(target, h, taken[None, :] & exists[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _skinny_kernel(
    x,
    weight,
    bias,
    out,
    slots,
    ranks,
    stack,
    slot_stride,
    offset,
    sums,
    num_rows,
    num_out,
    num_in,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    MODULES: tl.constexpr,
    WIDTH: tl.constexpr,
    ADAPTER_RANKS: tl.constexpr,
    ADAPTER_DEPTH: tl.constexpr,
    ADAPTER_SPAN: tl.constexpr,
    ADAPTER_STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    if MODULES == 0:
        _multiply(program, x, weight, bias, out, num_rows, num_out, num_in, HAS_BIAS, ROWS, COLUMNS, DEPTH, SPLITS)
    else:
        num_own = num_out // COLUMNS * SPLITS
        if program < num_own:
            _multiply(program, x, weight, bias, out, num_rows, num_out, num_in, HAS_BIAS, ROWS, COLUMNS, DEPTH, SPLITS)
        else:
            _shrink(
                program - num_own,
                x,
                slots,
                ranks,
                stack,
                slot_stride,
                offset,
                sums,
                num_rows,
                num_in,
                ROWS,
                MODULES,
                WIDTH,
                ADAPTER_RANKS,
                ADAPTER_DEPTH,
                ADAPTER_SPAN,
                ADAPTER_STAGES,
            )
