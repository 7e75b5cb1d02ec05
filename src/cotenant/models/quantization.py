"""Linear modules with weights in fp8: 8-bit floats of the kind e4m3, with one scale for each output channel.

Activations are quantised when they come, with one scale for each token, and the scaled matmul multiplies fp8 by fp8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from cotenant.core.errors import InvalidInputError
from cotenant.models.fused_linear import FusedLinear
from cotenant.models.lora import MODULE_GROUPS
from cotenant.models.products import has_triton
from cotenant.models.spec import ModelSpec

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
_SMALLEST_PEAK = 1e-30  # keeps the reciprocals of scales finite; a row below it, all zeros say, needs no precision

_MIN_CAPABILITY = (8, 9)
_DTYPES = (torch.bfloat16, torch.float16)
_MULTIPLE = 16  # of both sizes of a weight, for torch._scaled_mm


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, features] -> fp8 values [rows, features] and float32 scales [rows, 1]; their product is about ``x``.

    The error of an element is at most 1/16 of it, or 2**-10 of the scale where that is more. Rows that hold infinities
    or NaN give NaN.
    """
    if x.is_cuda and has_triton():
        from cotenant.models.kernels import quantize  # imports Triton

        return quantize.quantize_rows(x, _LARGEST, _SMALLEST_PEAK)
    return quantize_rows_plainly(x)


def quantize_rows_plainly(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``quantize_rows`` in torch's operations, for any device."""
    x = x.float()
    # At most three roundings of 2**-24 above 448, which is nearer to 448 than to any value above.
    scales = x.abs().amax(dim=1, keepdim=True).clamp_min(_SMALLEST_PEAK) * (1 / _LARGEST)
    return (x * (1.0 / scales)).to(FP8), scales


def dequantize(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What fp8 ``values`` and their ``scales`` stand for, rounded once to ``dtype``."""
    return values.to(dtype).mul_(scales)  # e4m3 is exact in every wider dtype, and the product is taken in float32


def scaled_product(
    x: tuple[torch.Tensor, torch.Tensor],
    weight: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``x @ weight.T + bias`` of quantised rows: [tokens, in], [out, in] -> [tokens, out] in ``dtype``.

    On a GPU by torch's scaled matmul; elsewhere in float32, which is what that rounds from.
    """
    (x_values, x_scales), (values, scales) = x, weight
    if x_values.is_cuda:
        # The bias apart: fused, some shapes have no kernel.
        product = torch._scaled_mm(
            x_values, values.T, scale_a=x_scales, scale_b=scales.T, out_dtype=dtype, use_fast_accum=True
        )
        return product if bias is None else product.add_(bias)
    out = (x_values.float() @ values.float().T) * x_scales * scales.T
    return (out if bias is None else out + bias).to(dtype)


@dataclass(frozen=True, slots=True)
class Fp8Linear(FusedLinear):
    """A ``FusedLinear`` whose ``weight`` is fp8. Inputs, outputs, gradients and ``bias`` are in half precision."""

    scales: torch.Tensor = field(kw_only=True)  # [sum of sizes, 1], float32

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return scaled_product(quantize_rows(x), (self.weight, self.scales), self.bias, x.dtype)

    def input_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient with the dequantised weight, as in QLoRA (Dettmers et al., section 3).

        The rounding of the activations counts as the identity.
        """
        return gradient @ dequantize(self.weight, self.scales, gradient.dtype)


def product_problem(
    device: torch.device, dtype: torch.dtype, multiply: Callable[..., torch.Tensor] = scaled_product
) -> str | None:
    """What is wrong with products of quantised rows on this device, found by making one; None if nothing is.

    ``torch._scaled_mm`` has several kernels for a scale per row; which one it takes follows from the GPU and the CUDA
    libraries. Some refuse, and CUTLASS's, which GPUs of compute capability 8.9 get, put bfloat16's bits where float16's
    were asked for (until pytorch/pytorch#187569).
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = (quantize_rows_plainly(torch.randn((rows, 128), generator=generator)) for rows in (32, 128))
    expected = scaled_product(x, weight, None, torch.float32)
    there = [(values.to(device), scales.to(device)) for values, scales in (x, weight)]
    try:
        found = multiply(*there, None, dtype).float().cpu()
    except (RuntimeError, ValueError) as error:
        return f"torch {torch.__version__} cannot multiply it there: {error}"
    if not (found - expected).abs().max() < 0.02 * expected.abs().max():
        return f"torch {torch.__version__} multiplies it wrongly there"
    return None


def require_support(quantization: str, device: torch.device, dtype: torch.dtype, spec: ModelSpec) -> None:
    """Raise InvalidInputError, saying why and what to do, if a model cannot be run so on this device."""
    problem = _problem(quantization, device, dtype, spec)
    if problem is not None:
        raise InvalidInputError(f"--quantization {quantization}: {problem}", param="quantization")


def _problem(quantization: str, device: torch.device, dtype: torch.dtype, spec: ModelSpec) -> str | None:
    if quantization != "fp8":
        return "not known; supported is fp8"
    needed = ".".join(map(str, _MIN_CAPABILITY))
    if device.type != "cuda":
        return f"needs an NVIDIA GPU of compute capability {needed} or more, not the device {device}; leave it out"
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        name, found = torch.cuda.get_device_name(device), ".".join(map(str, capability))
        return f"needs compute capability {needed} or more, but {name} has {found}; leave it out"
    if dtype not in _DTYPES:
        return f"goes with --dtype bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    for group in MODULE_GROUPS:
        num_out, num_in = spec.group_shape(group)
        if num_out % _MULTIPLE or num_in % _MULTIPLE:
            return (
                f"needs weights whose sizes are multiples of {_MULTIPLE}, but those of {' and '.join(group)} are "
                f"{num_out} by {num_in}; leave it out for this model"
            )
    problem = product_problem(device, dtype)
    if problem is not None:
        kind, name = str(dtype).removeprefix("torch."), torch.cuda.get_device_name(device)
        found = ".".join(map(str, capability))
        advice = "leave it out" if dtype == torch.bfloat16 else "give --dtype bfloat16, or leave it out"
        return f"with --dtype {kind} on {name} (compute capability {found}), {problem}; {advice}"
    return None
