"""Rows to fp8 (e4m3) in one kernel: each row is read once, and its scale and values are written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ELEMENTS_PER_WARP = 512
_MAX_WARPS = 32


def quantize_rows(x: torch.Tensor, largest: float, smallest_peak: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, features] -> values in float8_e4m3fn [rows, features], and float32 scales [rows, 1].

    The largest magnitude of a row becomes ``largest``; rows with none above ``smallest_peak`` are scaled as if theirs
    was that. The arithmetic is that of ``models.quantization``'s plain version, operation by operation.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, num_features = x.shape
    values = torch.empty((num_rows, num_features), device=x.device, dtype=torch.float8_e4m3fn)
    scales = torch.empty((num_rows, 1), device=x.device, dtype=torch.float32)
    block = triton.next_power_of_2(num_features)
    num_warps = min(max(block // _ELEMENTS_PER_WARP, 1), _MAX_WARPS)
    _quantize_row[(num_rows,)](
        x, values, scales, x.stride(0), num_features, 1 / largest, smallest_peak, block, num_warps=num_warps
    )
    return values, scales


@triton.jit
def _quantize_row(
    x_ptr, values_ptr, scales_ptr, x_stride, num_features, inverse_largest, smallest_peak, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    is_inside = columns < num_features
    x = tl.load(x_ptr + row * x_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=0), smallest_peak) * inverse_largest
    values = x * tl.div_rn(1.0, scale)
    tl.store(values_ptr + row * num_features + columns, values.to(values_ptr.dtype.element_ty), mask=is_inside)
    tl.store(scales_ptr + row, scale)
