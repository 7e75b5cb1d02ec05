"""What a decoder layer keeps of its forward pass for its backward pass, which ``layer_backward`` writes out.

Only what a matrix product or attention made is kept. What the norms and the activation made is cheap to make again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from cotenant.models.dropout import DropoutMasks
from cotenant.models.lora import LoraAdapter, ModuleKey
from cotenant.models.training_pack import PackedLayer


class KeptDelta(NamedTuple):
    """One module's LoRA delta ``scale * (x * mask) @ a.T @ b.T`` on the kept rows. Dropout's mask follows from
    the tokens' keys, so it is made again."""

    adapter: LoraAdapter
    key: ModuleKey
    columns: slice  # of the group's output
    down: torch.Tensor  # [rows, rank]: (x * mask) @ a.T
    a: torch.Tensor  # [rank, in], in the dtype of x
    b: torch.Tensor  # [out, rank], in the dtype of x


class KeptAttention(Protocol):
    """What attention over the kept rows needs for its backward pass."""

    @property
    def out(self) -> torch.Tensor:
        """[rows, heads * head_dim]"""
        ...

    def backward(self, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """From the gradient of ``out`` to those of rotated queries, rotated keys and values, each of its shape."""
        ...


class KeptGraph(NamedTuple):
    """Attention as a graph of autograd's from ``leaves`` (rotated queries and keys, values) to ``out``."""

    leaves: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    out: torch.Tensor  # [rows, heads * head_dim]

    def backward(self, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            end = _Given.apply(self.out, gradient)  # type: ignore[no-untyped-call]
        query, key, value = torch.autograd.grad(end, self.leaves)
        return query, key, value


class _Given(torch.autograd.Function):
    """A scalar at which a backward pass begins with the gradient of ``out`` that is given: the same as to name it to
    autograd, which would check its shape with symbols, and import sympy for them in the first backward pass."""

    @staticmethod
    def forward(context: Any, out: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        context.gradient = gradient
        return out.new_zeros(())

    @staticmethod
    def backward(context: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return context.gradient, None


@dataclass(slots=True)
class LayerTape:
    """Given to ``Decoder.layer``, which fills it with what it computes of these rows of the batch: one training
    segment, all rows of one adapter.

    ``packed``: the layer's part of that adapter, if it is packed for training; ``buffers`` are then where what is kept
    lies, by the tape's names for it, and what each group of modules has for ``x @ a.T``, by its first module, and
    ``dropout`` is the adapter's; otherwise the adapter has it with it."""

    rows: slice
    packed: PackedLayer | None = None
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    dropout: DropoutMasks | None = None
    # By the group's first module.
    deltas: dict[str, list[KeptDelta]] = field(default_factory=dict)
    input: torch.Tensor = field(init=False)  # [rows, hidden]
    heads: torch.Tensor = field(init=False)  # [rows, heads + 2 * kv_heads, head_dim], before norm and rotation
    cos: torch.Tensor = field(init=False)  # [rows, 1, head_dim]
    signed_sin: torch.Tensor = field(init=False)  # [rows, 1, head_dim]
    attention: KeptAttention = field(init=False)
    middle: torch.Tensor = field(init=False)  # [rows, hidden], between attention and MLP
    gate_up: torch.Tensor = field(init=False)  # [rows, 2 * intermediate]

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """These rows of a tensor of the batch's. A copy where they are the smaller part: a view would keep the rest."""
        rows = tensor[self.rows]
        return rows.clone() if 2 * rows.shape[0] < tensor.shape[0] else rows
