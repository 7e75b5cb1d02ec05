"""A trainable adapter as captured graphs read and write it: matrices, and the gradients of a micro-batch, at addresses
that never change.

The modules of a group (those that read the same input) share their products: their ``a`` lie below each other, their
``b`` on the diagonal of one matrix, scales included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cotenant.models.dropout import DropoutMasks
from cotenant.models.fused_linear import FusedLinear
from cotenant.models.lane_products import add_product
from cotenant.models.lora import MODULE_GROUPS, LoraAdapter, LoraPair, ModuleKey
from cotenant.models.products import product


class _Part(NamedTuple):
    """One module's place in its group."""

    key: ModuleKey
    pair: LoraPair
    scale: float
    ranks: slice
    columns: slice  # of the group's output
    b_gradient: torch.Tensor  # [columns, ranks], float32


@dataclass(frozen=True, slots=True)
class _PackedGroup:
    """The matrices in the decoder's dtype, and where the gradients of a micro-batch go."""

    a: torch.Tensor  # [ranks, in]
    b: torch.Tensor  # [out, ranks]
    a_gradient: torch.Tensor  # [ranks, in], float32
    parts: tuple[_Part, ...]

    def refresh(self) -> None:
        for part in self.parts:
            self.a[part.ranks].copy_(part.pair.a.detach())
            torch.mul(part.pair.b.detach(), part.scale, out=self.b[part.columns, part.ranks])

    def linear(
        self,
        x: torch.Tensor,
        base: FusedLinear,
        down: torch.Tensor,
        add: torch.Tensor | None,
        out: torch.Tensor | None,
        dropout: DropoutMasks | None,
    ) -> torch.Tensor:
        """The delta comes first: a large product that begins with it costs less than a sum afterwards."""
        if dropout is None:
            torch.mm(x, self.a.T, out=down)
        else:
            for part in self.parts:
                torch.mm(dropout.apply(*part.key, x), self.a[part.ranks].T, out=down[:, part.ranks])
        out = x.new_empty(len(x), len(self.b)) if out is None else out
        if add is None:
            torch.mm(down, self.b.T, out=out)
        else:
            torch.addmm(add, down, self.b.T, out=out)
        add_product(out, x, base.weight.T)
        return out if base.bias is None else out.add_(base.bias)

    def input_backward(
        self, gradient: torch.Tensor, down_gradient: torch.Tensor, base: FusedLinear, dropout: DropoutMasks | None
    ) -> torch.Tensor:
        if dropout is None:
            return add_product(torch.mm(down_gradient, self.a), gradient, base.weight)
        x_gradient = base.input_gradient(gradient)
        for part in self.parts:
            dropout.add_applied(*part.key, x_gradient, down_gradient[:, part.ranks] @ self.a[part.ranks])
        return x_gradient

    def adapter_backward(
        self,
        x: torch.Tensor,
        gradient: torch.Tensor,
        down: torch.Tensor,
        down_gradient: torch.Tensor,
        dropout: DropoutMasks | None,
    ) -> None:
        if dropout is None:
            self.a_gradient.copy_(down_gradient.T @ x)
        else:
            for part in self.parts:
                self.a_gradient[part.ranks].copy_(down_gradient[:, part.ranks].T @ dropout.apply(*part.key, x))
        b_gradient = gradient.T @ down  # [out, ranks]; what is off the diagonal belongs to nobody
        for part in self.parts:
            torch.mul(b_gradient[part.columns, part.ranks], part.scale, out=part.b_gradient)


class PackedLayer:
    """The groups of one layer."""

    def __init__(self, groups: dict[str, _PackedGroup]) -> None:
        self._groups = groups

    @property
    def num_ranks(self) -> dict[str, int]:
        """The sum of the ranks of each group with LoRA, by its first module."""
        return {first: group.a.shape[0] for first, group in self._groups.items()}

    def tensors(self) -> Iterator[torch.Tensor]:
        """The matrices."""
        for group in self._groups.values():
            yield from (group.a, group.b)

    def refresh(self) -> None:
        """Take the weights over as they are now: the products read copies."""
        for group in self._groups.values():
            group.refresh()

    def linear(
        self,
        x: torch.Tensor,
        base: FusedLinear,
        down: torch.Tensor | None,
        *,
        add: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        dropout: DropoutMasks | None = None,
    ) -> torch.Tensor:
        """[tokens, in] -> [tokens, sum of sizes], plus ``add``, in ``out`` if given. ``down`` [tokens, ranks] gets
        ``x @ a.T``, of ``x`` after ``dropout`` if there is any; None without LoRA."""
        group = self._groups.get(base.modules[0])
        if group is not None:
            assert down is not None
            return group.linear(x, base, down, add, out, dropout)
        out = product(x, base.weight, base.bias, out)
        return out if add is None else out.add_(add)

    def input_backward(
        self,
        gradient: torch.Tensor,
        base: FusedLinear,
        *,
        needs_input: bool = True,
        dropout: DropoutMasks | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """From the gradient of ``linear``'s output to that of ``x``, if it is needed, and that of ``down``."""
        group = self._groups.get(base.modules[0])
        if group is None:
            return (base.input_gradient(gradient) if needs_input else None), None
        down_gradient = gradient @ group.b  # [tokens, ranks]
        x_gradient = group.input_backward(gradient, down_gradient, base, dropout) if needs_input else None
        return x_gradient, down_gradient

    def adapter_backward(
        self,
        x: torch.Tensor,
        gradient: torch.Tensor,
        base: FusedLinear,
        down: torch.Tensor,
        down_gradient: torch.Tensor,
        dropout: DropoutMasks | None = None,
    ) -> None:
        """The gradients of a group's matrices; they replace those of the micro-batch before."""
        self._groups[base.modules[0]].adapter_backward(x, gradient, down, down_gradient, dropout)


class _Gradients:
    """Float32 gradients of a micro-batch at an adapter's weights, in the order of ``LoraAdapter.parameters``."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._weights = list(weights)
        self.all = torch.zeros(sum(weight.numel() for weight in weights), device=weights[0].device)
        self._num_placed = self._end = 0

    def place(self, *weights: torch.Tensor) -> torch.Tensor:
        """Where those of the next weights [rows, columns] are, one below the other."""
        start = self._end
        for weight in weights:
            assert weight is self._weights[self._num_placed], "the order is that of the adapter's parameters"
            self._num_placed += 1
            self._end += weight.numel()
        return self.all[start : self._end].view(-1, weights[0].shape[1])


class TrainingPack:
    """The float32 weights of a trainable adapter in ``dtype``, and the gradients of the micro-batch in flight, which
    ``layers`` write. Those of the step are added up in ``gradient``, which is laid out as ``adapter.parameters()``.
    ``dropout``: the adapter's probability."""

    def __init__(self, adapter: LoraAdapter, dtype: torch.dtype, gradient: torch.Tensor) -> None:
        self.dropout = adapter.dropout
        self._gradient = gradient
        self._of_micro_batch = _Gradients(adapter.parameters())
        layers = []
        for layer in range(adapter.spec.num_layers):
            groups = {}
            for modules in MODULE_GROUPS:
                if any((layer, module) in adapter.weights for module in modules):
                    groups[modules[0]] = _pack_group(adapter, layer, modules, dtype, self._of_micro_batch)
            layers.append(groups)
        self.layers = tuple(map(PackedLayer, layers))

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that it has taken memory for."""
        yield self._of_micro_batch.all
        for layer in self.layers:
            yield from layer.tensors()

    def commit(self) -> None:
        """Add the micro-batch's gradients to the step's."""
        self._gradient += self._of_micro_batch.all


def _pack_group(
    adapter: LoraAdapter, layer: int, modules: Sequence[str], dtype: torch.dtype, gradients: _Gradients
) -> _PackedGroup:
    pairs = {module: adapter.weights[layer, module] for module in modules if (layer, module) in adapter.weights}
    a_gradient = gradients.place(*(pair.a for pair in pairs.values()))
    parts = []
    rank = column = 0
    for module in modules:
        columns = slice(column, column + adapter.spec.module_shape(module)[0])
        column = columns.stop
        if module in pairs:
            pair = pairs[module]
            ranks = slice(rank, rank + pair.a.shape[0])
            rank = ranks.stop
            key, scale = (layer, module), adapter.scale_of(layer, module)
            parts.append(_Part(key, pair, scale, ranks, columns, gradients.place(pair.b)))
    a = torch.empty(a_gradient.shape, dtype=dtype, device=a_gradient.device)
    return _PackedGroup(a, a.new_zeros(column, rank), a_gradient, tuple(parts))
