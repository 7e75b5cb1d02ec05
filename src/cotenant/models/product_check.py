"""Whether the library's matrix products are right on this device.

Where MPS limits a process to a part of a GPU's SMs (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE), they need not be: with 20 to
80% of an H200's, torch's left parts of their result unwritten, up to two thirds (bench/mps_products.py). Nothing fails
then: what was in that memory before, another result or not a number, goes on into the answers.
"""

from __future__ import annotations

import torch

from cotenant.core.errors import InvalidInputError
from cotenant.models.weights import DecoderWeights

ROWS = (16, 64, 512)  # libraries have other kernels for each
_MOST_ROWS_READ = 16  # that are looked at: tiles are taller
_MOST_ELEMENTS = 1 << 24  # at once, in float32
# Of an element, and of all elements' root mean square: many times what rounding to half precision may take.
_TOLERANCE, _ROOT_TOLERANCE = 0.02, 0.05


@torch.no_grad()
def wrong_share(x: torch.Tensor, weight: torch.Tensor) -> float:
    """Of ``x @ weight.T`` for x [rows, in] and weight [out, in], the share of the elements that are not near the sum of
    their products, or were not written at all. A few rows are looked at, and all columns."""
    got = x.new_full((len(x), len(weight)), torch.nan)
    torch.mm(x, weight.T, out=got)
    read = torch.arange(0, len(x), -(-len(x) // _MOST_ROWS_READ), device=x.device)
    inputs, columns = x[read].float(), max(1, _MOST_ELEMENTS // (len(read) * x.shape[1]))
    num_wrong = torch.zeros((), dtype=torch.int64, device=x.device)
    for some, ours in zip(weight.split(columns), got[read].float().split(columns, dim=1), strict=True):
        exact = (inputs[:, None] * some[None].float()).sum(-1)  # no product of matrices: that is what is in question
        near = _TOLERANCE * exact.abs() + _ROOT_TOLERANCE * exact.square().mean().sqrt()
        num_wrong += (~((ours - exact).abs() <= near)).sum()
    return int(num_wrong) / (len(read) * len(weight))


def check_products(weights: DecoderWeights) -> None:
    """Raises InvalidInputError if products with the first layer's matrices are wrong on their device."""
    layer = weights.layers[0]
    linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
    for matrix in (*(linear.weight for linear in linears), weights.head):
        if matrix.dtype not in (torch.bfloat16, torch.float16):
            continue  # another kind of product: the head's, in any case, is of this kind on a GPU
        generator = torch.Generator(matrix.device).manual_seed(0)
        for num_rows in ROWS:
            shape = (num_rows, matrix.shape[1])
            x = torch.randn(shape, generator=generator, device=matrix.device, dtype=matrix.dtype)
            if share := wrong_share(x, matrix):
                raise InvalidInputError(
                    f"matrix products are wrong on this device: {share:.1%} of the elements of one with {num_rows} "
                    f"rows and {len(matrix)} columns. It happens where NVIDIA MPS lets a process use a part of a GPU's "
                    "SMs: serve without CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, and without such a default of the daemon's"
                )
