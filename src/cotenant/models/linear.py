"""Linear layers over all rows of a batch, with each LoRA adapter's delta on its own rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from cotenant.models.batch import AdapterSpan
from cotenant.models.fused_linear import FusedLinear
from cotenant.models.lora import LoraAdapter, LoraPair
from cotenant.models.lora_stacks import GroupedLora


def linear(
    x: torch.Tensor,
    base: FusedLinear,
    layer: int,
    spans: Sequence[AdapterSpan] = (),
    grouped: GroupedLora | None = None,
) -> torch.Tensor:
    """[tokens, in] -> [tokens, sum of sizes]. Adapters come as ``spans``, part of the batch's structure, or as
    ``grouped``, which is data and can be captured in a CUDA graph, without autograd; not as both.

    Under autograd, gradients reach ``x`` and the matrices of adapters that require them.
    """
    if grouped is not None:
        assert not spans, "a batch has its adapters as spans or grouped"
        return grouped.linear(x, base, layer)
    if spans and torch.is_grad_enabled():
        trained = [matrix for span in spans for matrix in _trained(span.adapter, base, layer)]
        if trained or x.requires_grad:
            result: torch.Tensor = _LoraLinear.apply(x, base, layer, spans, *trained)  # type: ignore[no-untyped-call]
            return result
    out = base.product(x)
    for span in spans:
        for delta in _deltas(base, layer, span.adapter, _rows(x, span)):
            delta.add_to(_rows(out, span))
    return out


def _trained(adapter: LoraAdapter, base: FusedLinear, layer: int) -> list[torch.Tensor]:
    """The group's matrices that require grad, A before B, module by module."""
    pairs = (adapter.weights.get((layer, module), ()) for module in base.modules)
    return [matrix for pair in pairs for matrix in pair if matrix.requires_grad]


def _rows(tensor: torch.Tensor, span: AdapterSpan) -> torch.Tensor:
    return tensor if span.stop - span.start == tensor.shape[0] else tensor[span.start : span.stop]


class _Delta(NamedTuple):
    """What one module, or a block of a packed group, adds to the rows of a span: ``scale * inputs @ a.T @ b.T``."""

    pair: LoraPair | None  # the module's own matrices; None: packed
    columns: slice | None  # of the output; None: all
    scale: float
    mask: torch.Tensor | None  # [rows, in], dropout's factors
    down: torch.Tensor  # [rows, rank]: inputs @ a.T
    a: torch.Tensor  # [rank, in], in the dtype of the inputs
    b: torch.Tensor  # [out, rank], in the dtype of the inputs

    def add_to(self, out: torch.Tensor) -> None:
        """Add to ``out`` [rows, sum of sizes], in place."""
        target = out if self.columns is None else out[:, self.columns]
        if target.is_cpu:  # twice as fast there as a product that is accumulated in place
            target.add_(self.down @ self.b.T, alpha=self.scale)
        else:
            target.addmm_(self.down, self.b.T, alpha=self.scale)


def _deltas(base: FusedLinear, layer: int, adapter: LoraAdapter, x: torch.Tensor) -> Iterator[_Delta]:
    """The adapter's deltas in this group for inputs ``x`` [rows, in]."""
    if adapter.is_packed:
        group = adapter.packed(layer, base.modules[0])
        if group is not None:
            down = x @ group.a.T
            for columns, ranks, b in group.blocks:
                yield _Delta(None, columns, 1.0, None, down[:, ranks], group.a[ranks], b)
        return
    for module, columns in base.columns():
        pair = adapter.weights.get((layer, module))
        if pair is not None:
            a, b = pair.a.to(x.dtype), pair.b.to(x.dtype)
            mask = adapter.dropout_mask(layer, module, x)
            down = (x if mask is None else x * mask) @ a.T
            yield _Delta(pair, columns, adapter.scale_of(layer, module), mask, down, a, b)


class _LoraLinear(torch.autograd.Function):
    """``linear`` as one node of the graph.

    It keeps the input once for all modules of the group, adds the deltas in place, and computes no gradient for the
    frozen base weights.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, base: FusedLinear, layer: int, spans: Sequence[AdapterSpan], *trained: torch.Tensor
    ) -> torch.Tensor:
        out = base.product(x)
        places, parts = [], []
        for span in spans:
            for delta in _deltas(base, layer, span.adapter, _rows(x, span)):
                delta.add_to(_rows(out, span))
                places.append((span, delta.pair, delta.columns, delta.scale))
                parts += [delta.mask, delta.down, delta.a, delta.b]
        ctx.base, ctx.places = base, places
        ctx.save_for_backward(x, *parts)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients  # [tokens, sum of sizes]
        x, *parts = ctx.saved_tensors
        x_gradient = ctx.base.input_gradient(gradient) if ctx.needs_input_grad[0] else None  # [tokens, in]
        trained: list[torch.Tensor] = []
        for index, (span, pair, columns, scale) in enumerate(ctx.places):
            mask, down, a, b = parts[4 * index : 4 * index + 4]
            rows = _rows(gradient, span) if columns is None else _rows(gradient, span)[:, columns]  # [rows, out]
            # Transposed products: with one side this narrow, MKL takes three to six times as long the other way.
            down_gradient = (b.T @ rows.T).mul_(scale).T  # [rows, rank]
            if x_gradient is not None:
                _add_input_gradient(_rows(x_gradient, span), down_gradient, a, mask)
            if pair is not None and pair.a.requires_grad:
                inputs = _rows(x, span) if mask is None else _rows(x, span) * mask  # [rows, in]
                trained.append((down_gradient.T @ inputs).to(pair.a.dtype))
            if pair is not None and pair.b.requires_grad:
                trained.append((down.T @ rows).mul_(scale).T.to(pair.b.dtype))
        return x_gradient, None, None, None, *trained


def _add_input_gradient(
    target: torch.Tensor, down_gradient: torch.Tensor, a: torch.Tensor, mask: torch.Tensor | None
) -> None:
    if mask is None:
        target.addmm_(down_gradient, a)
    else:
        target.addcmul_(down_gradient @ a, mask)
