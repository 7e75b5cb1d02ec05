"""The frozen weights of linear modules that read the same input, as one matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from cotenant.models.compressed import CompressedWeight
from cotenant.models.products import product


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """Modules that read the same input, as one matrix: module after module, ``sizes[i]`` output features each."""

    modules: tuple[str, ...]
    sizes: tuple[int, ...]
    weight: torch.Tensor  # [sum of sizes, in], frozen
    bias: torch.Tensor | None = None  # [sum of sizes], frozen
    compressed: CompressedWeight | None = None  # the same as ``weight``, for decode steps

    def columns(self) -> Iterator[tuple[str, slice]]:
        """Each module with its slice of the output's columns."""
        start = 0
        for module, size in zip(self.modules, self.sizes, strict=True):
            yield module, slice(start, start + size)
            start += size

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, in] -> [tokens, sum of sizes], bias included."""
        return product(x, self.weight, self.bias)

    def input_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of ``product``'s input: [tokens, sum of sizes] -> [tokens, in]."""
        return gradient @ self.weight
