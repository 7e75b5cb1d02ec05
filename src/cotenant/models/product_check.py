"""Whether the library's matrix products are right on this device.

Where MPS limits a process to a part of a GPU's SMs (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE), they need not be: with 20 to
80% of an H200's, torch's left parts of their result unwritten, up to two thirds (bench/mps_products.py). Nothing fails
then: what was in that memory before, another result or not a number, goes on into the answers.

Products with a bias and those of fp8 go other ways through the library, which are not tried here.
"""

from __future__ import annotations

import logging
import time

import torch

from cotenant.core.errors import InvalidInputError
from cotenant.models.weights import DecoderWeights

logger = logging.getLogger(__name__)

_ROWS = (16, 64, 512)  # libraries have other kernels for each
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_ROWS_SUMMED = 16
_MOST_ELEMENTS = 1 << 24  # at once, in float32
# Of an element, and of a column's mean magnitude: many times what rounding to half precision may take.
_TOLERANCE, _COLUMN_TOLERANCE = 0.02, 0.05


@torch.no_grad()
def wrong_share(x: torch.Tensor, weight: torch.Tensor) -> float:
    """Of ``x @ weight.T`` for x [rows, in] and weight [out, in], the share of the elements that were not written, or
    that are not near the sum of their products, whichever is more. The latter in some of the rows, and neither in
    columns that hold what the dtype has no number for."""
    got, limits = x.new_full((len(x), len(weight)), torch.nan), torch.finfo(x.dtype)
    torch.mm(x, weight.T, out=got)
    summed = torch.arange(0, len(x), -(-len(x) // _MOST_ROWS_SUMMED), device=x.device)
    inputs, columns = x[summed].float(), max(1, _MOST_ELEMENTS // (len(summed) * x.shape[1]))
    wrong = torch.zeros(2, dtype=torch.int64, device=x.device)
    for some, ours in zip(weight.split(columns), got.split(columns, dim=1), strict=True):
        exact = (inputs[:, None] * some[None].float()).sum(-1)  # no product of matrices: that is what is in question
        counts = (exact.abs() < limits.max).all(0)
        near = _TOLERANCE * exact.abs() + _COLUMN_TOLERANCE * exact.abs().mean(0) + limits.tiny
        far = ~((ours[summed].float() - exact).abs() <= near)
        wrong += torch.stack([(ours.isnan() & counts).sum(), (far & counts).sum()])
    unwritten, far_off = map(int, wrong.tolist())
    return max(unwritten / got.numel(), far_off / (len(summed) * len(weight)))


def check_products(weights: DecoderWeights) -> None:
    """Raises InvalidInputError if products with the first layer's matrices or the head are wrong on their device."""
    layer, start = weights.layers[0], time.perf_counter()
    linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
    for matrix in (*(linear.weight for linear in linears), weights.head):
        if matrix.dtype not in _DTYPES:
            continue
        generator = torch.Generator(matrix.device).manual_seed(0)
        for num_rows in _ROWS:
            shape = (num_rows, matrix.shape[1])
            x = torch.randn(shape, generator=generator, device=matrix.device, dtype=matrix.dtype)
            if share := wrong_share(x, matrix):
                raise InvalidInputError(
                    f"matrix products are wrong on this device: {share:.1%} of the elements of one with {num_rows} "
                    f"rows and {len(matrix)} columns. It happens where NVIDIA MPS lets a process use a part of a GPU's "
                    "SMs: serve without CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, and without such a default of the daemon's"
                )
    logger.info("matrix products are right, tried in %.2f s", time.perf_counter() - start)
