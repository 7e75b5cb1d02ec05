"""A layer's steps between its matrix products, forward and backward: one kernel each on NVIDIA GPUs, plain torch
operations elsewhere and wherever autograd is on. Both round at the same places.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cotenant.models.products import runs_kernels
from cotenant.models.rope import rotate


def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMS norm of ``x`` [rows, hidden]. Rounds to its dtype before the weight is applied, as transformers does."""
    if runs_kernels(x):
        from cotenant.models.kernels import training

        return training.rms_norm(x, weight, epsilon)
    return _norm(x, weight, epsilon)


def norm_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    gradient: torch.Tensor,
    epsilon: float,
    add: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """From the gradient of ``norm``'s output [rows, hidden] to that of ``x``, plus ``add``; in ``out`` if given."""
    if runs_kernels(x):
        from cotenant.models.kernels import training

        return training.norm_backward(x, weight, gradient, epsilon, add, out)
    result = _norm_backward(x, weight, gradient, epsilon)
    if add is not None:
        result += add
    return result if out is None else out.copy_(result)


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """silu of the left half times the right half: [rows, 2 * width] -> [rows, width]."""
    if runs_kernels(gate_up):
        from cotenant.models.kernels import elementwise

        return elementwise.silu_and_multiply(gate_up)
    gate, up = gate_up.chunk(2, dim=1)
    return F.silu(gate) * up


def silu_backward(
    gate_up: torch.Tensor, gradient: torch.Tensor, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of ``silu_and_multiply`` again, in the memory of its ``gradient`` [rows, width], and the gradient of
    ``gate_up`` [rows, 2 * width], in ``out`` if given, which may be ``gate_up``."""
    if runs_kernels(gate_up):
        from cotenant.models.kernels import training

        return training.silu_backward(gate_up, gradient, out)
    gate, up = gate_up.chunk(2, dim=1)
    silu = F.silu(gate)
    result = torch.empty_like(gate_up)
    torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=result[:, : gate.shape[1]])
    torch.mul(gradient, silu, out=result[:, gate.shape[1] :])
    activated = torch.mul(silu, up, out=gradient)
    return activated, result if out is None else out.copy_(result)


def rotate_heads(
    heads: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    num_rotated: int,
    weight: torch.Tensor | None,
    epsilon: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The first ``num_rotated`` of ``heads`` [tokens, heads, head_dim], rotated: [tokens, num_rotated, head_dim], in
    ``out`` if given. With ``weight`` [num_rotated, head_dim] each is normalised first. ``cos``, ``signed_sin``: see
    ``RopeTables.at``."""
    if runs_kernels(heads):
        from cotenant.models.kernels import training

        return training.rotate_heads(heads, cos, signed_sin, num_rotated, weight, epsilon, out)
    rotated = heads[:, :num_rotated]
    if weight is not None:
        rotated = _norm(rotated, weight, epsilon)
    rotated = rotate(rotated, cos, signed_sin)
    return rotated if out is None else out.copy_(rotated)


def rotate_heads_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    heads: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
) -> torch.Tensor:
    """From the gradients of rotated queries [tokens, heads, head_dim], rotated keys and values
    [tokens, kv_heads, head_dim] to that of ``heads`` [tokens, heads + 2 * kv_heads, head_dim], which ``rotate_heads``
    was given; ``heads`` is read only if they were normalised."""
    if runs_kernels(query):
        from cotenant.models.kernels import training

        return training.rotate_heads_backward(query, key, value, cos, signed_sin, heads, weight, epsilon)
    rotated = rotate(torch.cat([query, key], dim=1), cos, -signed_sin)  # a rotation's transpose
    if weight is not None:
        rotated = _norm_backward(heads[:, : rotated.shape[1]], weight, rotated, epsilon)
    return torch.cat([rotated, value], dim=1)


def _norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Over the last dimension."""
    size = x.shape[-1:]
    if x.dtype == torch.float32 and weight.dim() == 1:
        return F.rms_norm(x, size, weight, epsilon)
    return weight * F.rms_norm(x.float(), size, None, epsilon).to(x.dtype)


def _norm_backward(x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    unit = wide * scale
    inner = (gradient * weight).float()
    return ((inner - unit * (inner * unit).mean(dim=-1, keepdim=True)) * scale).to(x.dtype)
