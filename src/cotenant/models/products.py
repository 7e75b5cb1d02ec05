"""Products with frozen matrices outside autograd, by whatever is fastest for the shape at hand."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
import torch.nn.functional as F


@cache
def has_triton() -> bool:
    """Whether kernels written in Triton can be compiled here."""
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


def runs_kernels(x: torch.Tensor) -> bool:
    """Whether what is done to ``x`` is left to kernels written in Triton: they know no autograd."""
    return x.is_cuda and not torch.is_grad_enabled() and has_triton()


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``x @ weight.T + bias``: [rows, in] and [out, in] -> [rows, out], written to ``out`` if given."""
    if runs_kernels(x):
        from cotenant.models.kernels.skinny import fits, skinny_product

        if fits(x, weight):
            return skinny_product(x, weight, bias, out)
    if out is None:
        return F.linear(x, weight, bias)
    torch.mm(x, weight.T, out=out)
    return out if bias is None else out.add_(bias)
