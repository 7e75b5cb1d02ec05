"""Linear layers over all rows of a batch, with each LoRA adapter's delta on its own rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from cotenant.models.batch import AdapterSpan
from cotenant.models.fused_linear import FusedLinear
from cotenant.models.lora import LoraAdapter
from cotenant.models.lora_stacks import GroupedLora
from cotenant.models.tape import KeptDelta, LayerTape


def linear(
    x: torch.Tensor,
    base: FusedLinear,
    layer: int,
    spans: Sequence[AdapterSpan] = (),
    grouped: GroupedLora | None = None,
    tape: LayerTape | None = None,
) -> torch.Tensor:
    """[tokens, in] -> [tokens, sum of sizes]. Adapters come as ``spans``, part of the batch's structure, or as
    ``grouped``, which is data and can be captured in a CUDA graph; not as both. With ``tape`` the deltas of its
    rows are kept for ``input_backward``; training runs without autograd.
    """
    if grouped is not None:
        assert not spans, "a batch has its adapters as spans or grouped"
        return grouped.linear(x, base, layer)
    out = base.product(x)
    for span in spans:
        keeps = tape is not None and tape.rows.start == span.start
        kept: list[KeptDelta] = []
        for delta in _deltas(base, layer, span.adapter, _rows(x, span)):
            delta.add_to(_rows(out, span))
            if keeps and delta.module is not None and delta.columns is not None:
                key = (layer, delta.module)
                kept.append(KeptDelta(span.adapter, key, delta.columns, delta.down, delta.a, delta.b))
        if tape is not None and keeps:
            tape.deltas[base.modules[0]] = kept
    return out


# A weight's gradient, from the rows of one micro-batch.
AddGradient = Callable[[torch.Tensor, torch.Tensor], None]


class DownGradient(NamedTuple):
    """Of one ``KeptDelta``, between ``input_backward`` and ``adapter_backward``."""

    gradient: torch.Tensor  # [rows, rank]: of ``down``, scale included
    mask: torch.Tensor | None  # [rows, in]: dropout's


def input_backward(
    like: torch.Tensor,
    gradient: torch.Tensor,
    base: FusedLinear,
    deltas: Sequence[KeptDelta],
    *,
    needs_input: bool = True,
) -> tuple[torch.Tensor | None, list[DownGradient]]:
    """From the gradient of ``linear``'s output [rows, sum of sizes] to that of its input [rows, in], if it is needed,
    and what ``adapter_backward`` goes on with. ``like`` has the shape and dtype of the input, which need not exist
    yet."""
    x_gradient = base.input_gradient(gradient) if needs_input else None  # [rows, in]
    downs = []
    for adapter, key, part, _, a, b in deltas:
        scale, mask = adapter.scale_of(*key), adapter.dropout_mask(*key, like)
        # Transposed products: with one side this narrow, MKL takes three to six times as long the other way.
        down_gradient = (b.T @ gradient[:, part].T).mul_(scale).T  # [rows, rank]
        if x_gradient is not None:
            _add_input_gradient(x_gradient, down_gradient, a, mask)
        downs.append(DownGradient(down_gradient, mask))
    return x_gradient, downs


def adapter_backward(
    x: torch.Tensor,
    gradient: torch.Tensor,
    deltas: Sequence[KeptDelta],
    downs: Sequence[DownGradient],
    add_gradient: AddGradient,
) -> None:
    """Once the input ``x`` [rows, in] is there: ``add_gradient`` gets each of the adapters' matrices with its gradient,
    in the matrix's dtype and layout."""
    for (adapter, key, part, down, _, _), (down_gradient, mask) in zip(deltas, downs, strict=True):
        pair, scale = adapter.weights[key], adapter.scale_of(*key)
        inputs = x if mask is None else x * mask  # [rows, in]
        add_gradient(pair.a, (down_gradient.T @ inputs).to(pair.a.dtype))
        add_gradient(pair.b, (down.T @ gradient[:, part]).mul_(scale).T.to(pair.b.dtype).contiguous())


def _rows(tensor: torch.Tensor, span: AdapterSpan) -> torch.Tensor:
    return tensor if span.stop - span.start == tensor.shape[0] else tensor[span.start : span.stop]


class _Delta(NamedTuple):
    """What one module, or a block of a packed group, adds to the rows of a span: ``scale * inputs @ a.T @ b.T``."""

    module: str | None  # None: of several modules, packed
    columns: slice | None  # of the output; None: all
    scale: float
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
                yield _Delta(None, columns, 1.0, down[:, ranks], group.a[ranks], b)
        return
    for module, columns in base.columns():
        pair = adapter.weights.get((layer, module))
        if pair is not None:
            a, b = pair.a.to(x.dtype), pair.b.to(x.dtype)
            mask = adapter.dropout_mask(layer, module, x)
            down = (x if mask is None else x * mask) @ a.T
            yield _Delta(module, columns, adapter.scale_of(layer, module), down, a, b)


def _add_input_gradient(
    target: torch.Tensor, down_gradient: torch.Tensor, a: torch.Tensor, mask: torch.Tensor | None
) -> None:
    if mask is None:
        target.addmm_(down_gradient, a)
    else:
        target.addcmul_(down_gradient @ a, mask)
