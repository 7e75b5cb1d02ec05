"""How large a micro-batch may be while part of training's memory is wanted elsewhere.

Sizes come from a short ladder, so that few shapes of tasklets occur: the predictor knows them soon, and each can be
captured once. (Harli, section 6.1, and SIRIUS, section 4.1, give training's memory back as well, by other means.)
"""

from __future__ import annotations

import torch

from cotenant.finetune.footprint import activation_bytes
from cotenant.models.spec import ModelSpec

# Halvings of the largest micro-batch that are rungs.
_MOST_HALVINGS = 5


def ladder(most: int, longest: int) -> tuple[int, ...]:
    """Tokens of micro-batches, ascending: ``longest``, the example that no micro-batch can be smaller than, then
    halvings of ``most``, and ``most``."""
    halves = [most >> step for step in range(_MOST_HALVINGS + 1)]
    return tuple(sorted({longest, *(size for size in halves if size > longest)}))


class ActivationBudget:
    """Training's memory for activations: what the largest micro-batch takes, less what was given away.

    ``longest``: tokens of the longest example.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, most: int, longest: int, *, recompute: bool) -> None:
        sizes = ladder(most, longest)
        self._bytes = {size: activation_bytes(spec, size, dtype, recompute=recompute) for size in sizes}
        self._total = self._bytes[sizes[-1]]
        self.lent_bytes = 0

    @property
    def max_tokens(self) -> int:
        """Tokens of a micro-batch; 0 when not even the smallest has room."""
        left = self._total - self.lent_bytes
        return max((size for size, needed in self._bytes.items() if needed <= left), default=0)

    def require(self, num_bytes: int) -> int:
        """Give away as much of ``num_bytes`` as there is; how much that was."""
        given = min(num_bytes, self._total - self.lent_bytes)
        self.lent_bytes += given
        return given

    def release(self, num_bytes: int) -> None:
        """Take back what was given away. Raises ValueError for more than that."""
        if num_bytes > self.lent_bytes:
            raise ValueError(f"{num_bytes} bytes given back, but only {self.lent_bytes} were given away")
        self.lent_bytes -= num_bytes
