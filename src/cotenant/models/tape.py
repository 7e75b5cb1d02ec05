"""What a decoder layer keeps of its forward pass for its backward pass, which ``layer_backward`` writes out.

Only what a matrix product or attention made is kept. What the norms and the activation made is cheap to make again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from cotenant.models.lora import LoraAdapter, ModuleKey


class KeptDelta(NamedTuple):
    """One module's LoRA delta ``scale * (x * mask) @ a.T @ b.T`` on the kept rows. Dropout's mask follows from the
    adapter's seed and the shape of x, so it is made again."""

    adapter: LoraAdapter
    key: ModuleKey
    columns: slice  # of the group's output
    down: torch.Tensor  # [rows, rank]: (x * mask) @ a.T
    a: torch.Tensor  # [rank, in], in the dtype of x
    b: torch.Tensor  # [out, rank], in the dtype of x


class KeptAttention(NamedTuple):
    """Attention over the kept rows, as a graph from ``leaves`` (rotated queries and keys, values) to ``out``."""

    leaves: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    out: torch.Tensor  # [rows, heads * head_dim]

    def backward(self, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of the leaves, each of its leaf's shape."""
        query, key, value = torch.autograd.grad(self.out, self.leaves, gradient)
        return query, key, value


@dataclass(slots=True)
class LayerTape:
    """Given to ``Decoder.layer``, which fills it with what it computes of these rows of the batch: one training
    segment, all rows of one adapter."""

    rows: slice
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
