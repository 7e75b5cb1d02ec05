"""The backward pass of a decoder layer and of the head, written out, one layer at a time; only attention
goes back through a graph of its own.

The base weights are frozen, so what is computed are the gradients of the layer's input and of its LoRA matrices. Each
operation rounds where autograd would.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cotenant.models.decoder import Decoder
from cotenant.models.elementwise_ops import norm_backward, rotate_heads_backward, silu_backward
from cotenant.models.fused_linear import FusedLinear
from cotenant.models.linear import AddGradient, DownGradient, adapter_backward, input_backward
from cotenant.models.tape import LayerTape


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

    ``add_gradient`` gets each LoRA matrix of the layer with its gradient, unless the adapter is packed. ``tape`` can be
    used once.
    """
    middle = mlp_backward(decoder, index, tape, gradient, add_gradient)
    return attention_backward(decoder, index, tape, middle, add_gradient, needs_input=needs_input)


def head_backward(decoder: Decoder, hidden: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """From the gradient of ``Decoder.raw_logits`` [rows, vocab] to that of ``hidden`` [rows, hidden]."""
    weights = decoder.weights
    return norm_backward(hidden, weights.final_norm, gradient @ weights.head, decoder.spec.rms_norm_eps)


def mlp_backward(
    decoder: Decoder, index: int, tape: LayerTape, gradient: torch.Tensor, add_gradient: AddGradient
) -> torch.Tensor:
    """The first half of ``layer_backward``: to the gradient at ``tape.middle`` [rows, hidden]."""
    gate_up = down_backward(decoder, index, tape, gradient, add_gradient)
    return up_backward(decoder, index, tape, gate_up, gradient, add_gradient)


def down_backward(
    decoder: Decoder, index: int, tape: LayerTape, gradient: torch.Tensor, add_gradient: AddGradient | None = None
) -> torch.Tensor:
    """From the gradient of the layer's output to that of ``tape.gate_up``; it takes the place of that where the adapter
    is packed, which needs no ``add_gradient``."""
    down = decoder.weights.layers[index].down
    like = tape.gate_up.chunk(2, dim=1)[0]
    activated_gradient, downs = _input_backward(like, gradient, down, tape)  # [rows, intermediate]
    assert activated_gradient is not None
    out = tape.gate_up if tape.packed is not None else None
    activated, gate_up = silu_backward(tape.gate_up, activated_gradient, out)
    _adapter_backward(activated, gradient, down, tape, downs, add_gradient)
    return gate_up


def up_backward(
    decoder: Decoder,
    index: int,
    tape: LayerTape,
    gate_up: torch.Tensor,
    gradient: torch.Tensor,
    add_gradient: AddGradient | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """From ``gate_up``, the gradient that ``down_backward`` gave, and that of the layer's output, to the gradient at
    ``tape.middle`` [rows, hidden], in ``out`` if given."""
    weights, epsilon = decoder.weights.layers[index], decoder.spec.rms_norm_eps
    normed = decoder.norm(tape.middle, weights.mlp_norm)
    inner, downs = _input_backward(normed, gate_up, weights.gate_up, tape)
    assert inner is not None
    _adapter_backward(normed, gate_up, weights.gate_up, tape, downs, add_gradient)
    return norm_backward(tape.middle, weights.mlp_norm, inner, epsilon, add=gradient, out=out)


def attention_backward(
    decoder: Decoder,
    index: int,
    tape: LayerTape,
    gradient: torch.Tensor,
    add_gradient: AddGradient | None = None,
    *,
    needs_input: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The second half: from the gradient at ``tape.middle`` to that of the layer's input [rows, hidden]."""
    weights, epsilon = decoder.weights.layers[index], decoder.spec.rms_norm_eps
    attended = tape.attention.out.detach()
    attended_gradient, downs = _input_backward(attended, gradient, weights.output, tape)
    assert attended_gradient is not None
    _adapter_backward(attended, gradient, weights.output, tape, downs, add_gradient)
    query, key, value = tape.attention.backward(attended_gradient)
    heads = rotate_heads_backward(
        query, key, value, tape.cos, tape.signed_sin, tape.heads, weights.qk_norm, epsilon
    ).flatten(1)  # [rows, (heads + 2 * kv_heads) * head_dim]
    normed = decoder.norm(tape.input, weights.input_norm)
    inner, downs = _input_backward(normed, heads, weights.qkv, tape, needs_input=needs_input)
    _adapter_backward(normed, heads, weights.qkv, tape, downs, add_gradient)
    if inner is None:
        return None
    return norm_backward(tape.input, weights.input_norm, inner, epsilon, add=gradient, out=out)


_Downs = Sequence[DownGradient] | torch.Tensor | None


def _input_backward(
    like: torch.Tensor, gradient: torch.Tensor, base: FusedLinear, tape: LayerTape, *, needs_input: bool = True
) -> tuple[torch.Tensor | None, _Downs]:
    """The gradient of a linear's input, and what ``_adapter_backward`` goes on with."""
    if tape.packed is not None:
        return tape.packed.input_backward(gradient, base, needs_input=needs_input, dropout=tape.dropout)
    return input_backward(like, gradient, base, tape.deltas[base.modules[0]], needs_input=needs_input)


def _adapter_backward(
    x: torch.Tensor,
    gradient: torch.Tensor,
    base: FusedLinear,
    tape: LayerTape,
    downs: _Downs,
    add_gradient: AddGradient | None,
) -> None:
    """The gradients of the LoRA matrices of a linear with input ``x``."""
    if tape.packed is None:
        assert isinstance(downs, Sequence)
        assert add_gradient is not None
        adapter_backward(x, gradient, tape.deltas[base.modules[0]], downs, add_gradient)
    elif downs is not None:
        assert isinstance(downs, torch.Tensor)
        down = tape.buffers[base.modules[0]]
        tape.packed.adapter_backward(x, gradient, base, down, downs, tape.dropout)
