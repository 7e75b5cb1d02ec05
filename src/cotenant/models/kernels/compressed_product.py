"""Launches ``compressed_product.cu``: products of a few rows with compressed matrices, read in three quarters of their
bytes.

The copies into shared memory are orders to the memory's own engine, so no thread waits for them, and what four warps
decode and multiply keeps up with what an SM gets from memory: on part of a GPU's SMs it takes less time, and leaves
training more power, than a kernel whose threads copy for themselves.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from cotenant.device.cuda.compiled import Argument, CompiledKernel, pointer, rows_as_copied
from cotenant.models.compressed import BLOCK_DEPTH, MAX_LIST_BYTES, CompressedWeight
from cotenant.models.kernels.overlap import overlap
from cotenant.models.skinny_tiling import CompressedTiling

_NUM_THREADS = 160
_NOTHING: Argument = (0, ctypes.c_void_p)


def compressed_product(
    x: torch.Tensor, weight: CompressedWeight, bias: torch.Tensor | None, out: torch.Tensor, tiling: CompressedTiling
) -> None:
    """``x`` [rows, in] times ``weight`` to ``out`` [splits, rows, out], bfloat16 or float32. A row's result does not
    depend on the other rows, nor on how many there are, nor on the SMs."""
    assert x.is_contiguous()
    assert x.dtype == torch.bfloat16
    (num_rows, num_in), num_out = x.shape, weight.shape[0]
    begins_early = overlap(x.device)["launch_pdl"]
    _compiled(tiling.rows, tiling.num_stages, tiling.per_sm, tiling.shared_bytes, begins_early).launch(
        tiling.num_programs(num_out),
        _NUM_THREADS,
        (
            rows_as_copied(x, BLOCK_DEPTH, tiling.rows),
            pointer(weight.blocks),
            _NOTHING if bias is None else pointer(bias),
            pointer(out),
            *((number, ctypes.c_int) for number in (num_rows, num_out, num_in, tiling.splits)),
            *(
                (number, ctypes.c_int)
                for number in (weight.blocks.shape[2], weight.base, int(out.dtype == torch.float32))
            ),
        ),
        begins_early=begins_early,
    )


@cache
def _compiled(rows: int, num_stages: int, per_sm: int, shared_bytes: int, overlaps: bool) -> CompiledKernel:
    constants = {
        "ROWS": rows,
        "STAGES": num_stages,
        "PER_SM": per_sm,
        "LIST_BYTES": MAX_LIST_BYTES,
        "OVERLAP": int(overlaps),
    }
    source = Path(__file__).with_suffix(".cu").read_text()
    return CompiledKernel(source, "compressed_product", constants, shared_bytes, is_specific=True)
