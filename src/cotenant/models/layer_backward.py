"""The backward pass of a decoder layer and of the head, written out, one layer at a time; only attention
goes back through a graph of its own.

The base weights are frozen, so what is computed are the gradients of the layer's input and of its LoRA matrices. Each
operation rounds where autograd would.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cotenant.models.decoder import Decoder
from cotenant.models.fused_linear import FusedLinear
from cotenant.models.linear import AddGradient, linear_backward
from cotenant.models.rope import rotate
from cotenant.models.tape import LayerTape
from cotenant.models.weights import LayerWeights


def layer_backward(
    decoder: Decoder,
    index: int,
    tape: LayerTape,
    gradient: torch.Tensor,
    add_gradient: AddGradient,
    *,
    needs_input: bool = True,
) -> torch.Tensor | None:
    """From the gradient of the layer's output [rows, hidden] to that of its input, if it is needed.

    ``add_gradient`` gets each LoRA matrix of the layer with its gradient. ``tape`` can be used once.
    """
    weights = decoder.weights.layers[index]
    middle = _mlp_backward(decoder, weights, tape, gradient, add_gradient)
    return _attention_backward(decoder, weights, tape, middle, add_gradient, needs_input)


def head_backward(decoder: Decoder, hidden: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """From the gradient of ``Decoder.raw_logits`` [rows, vocab] to that of ``hidden`` [rows, hidden]."""
    weights = decoder.weights
    return norm_backward(hidden, weights.final_norm, gradient @ weights.head, decoder.spec.rms_norm_eps)


def _mlp_backward(
    decoder: Decoder, weights: LayerWeights, tape: LayerTape, gradient: torch.Tensor, add_gradient: AddGradient
) -> torch.Tensor:
    """The gradient at ``tape.middle``: [rows, hidden]."""
    gate, up = tape.gate_up.chunk(2, dim=1)
    silu = F.silu(gate)
    activated = _linear_backward(silu * up, gradient, weights.down, tape, add_gradient)  # [rows, intermediate]
    gate_up = torch.empty_like(tape.gate_up)
    torch.ops.aten.silu_backward.grad_input(activated * up, gate, grad_input=gate_up[:, : gate.shape[1]])
    torch.mul(activated, silu, out=gate_up[:, gate.shape[1] :])
    normed = decoder.norm(tape.middle, weights.mlp_norm)
    inner = _linear_backward(normed, gate_up, weights.gate_up, tape, add_gradient)
    return norm_backward(tape.middle, weights.mlp_norm, inner, decoder.spec.rms_norm_eps).add_(gradient)


def _attention_backward(
    decoder: Decoder,
    weights: LayerWeights,
    tape: LayerTape,
    gradient: torch.Tensor,
    add_gradient: AddGradient,
    needs_input: bool,
) -> torch.Tensor | None:
    """From the gradient at ``tape.middle`` to that of the layer's input: [rows, hidden]."""
    spec = decoder.spec
    num_rotated = spec.num_heads + spec.num_kv_heads
    attended = _linear_backward(tape.attention.out.detach(), gradient, weights.output, tape, add_gradient)
    query, key, value = tape.attention.backward(attended)
    rotated = rotate(torch.cat([query, key], dim=1), tape.cos, -tape.signed_sin)  # a rotation's transpose
    if weights.qk_norm is not None:
        rotated = norm_backward(tape.heads[:, :num_rotated], weights.qk_norm, rotated, spec.rms_norm_eps)
    heads = torch.cat([rotated, value], dim=1).flatten(1)  # [rows, (heads + 2 * kv_heads) * head_dim]
    normed = decoder.norm(tape.input, weights.input_norm)
    deltas = tape.deltas[weights.qkv.modules[0]]
    inner = linear_backward(normed, heads, weights.qkv, deltas, add_gradient, needs_input=needs_input)
    if inner is None:
        return None
    return norm_backward(tape.input, weights.input_norm, inner, spec.rms_norm_eps).add_(gradient)


def _linear_backward(
    x: torch.Tensor, gradient: torch.Tensor, base: FusedLinear, tape: LayerTape, add_gradient: AddGradient
) -> torch.Tensor:
    x_gradient = linear_backward(x, gradient, base, tape.deltas[base.modules[0]], add_gradient)
    assert x_gradient is not None
    return x_gradient


def norm_backward(x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, epsilon: float) -> torch.Tensor:
    """From the gradient of ``Decoder.norm``'s output to that of ``x``, both [..., size]."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    unit = wide * scale
    inner = (gradient * weight).float()
    return ((inner - unit * (inner * unit).mean(dim=-1, keepdim=True)) * scale).to(x.dtype)
