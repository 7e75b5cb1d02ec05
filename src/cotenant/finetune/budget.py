"""How large a micro-batch may be while part of training's memory is wanted elsewhere.

Limits come from a short ladder, so that a little memory more or less does not cut every step anew. (SIRIUS, section
4.1, gives training's memory back as well, by other means.)
"""

from __future__ import annotations

import torch

from cotenant.finetune.footprint import activation_bytes, passing_bytes
from cotenant.models.spec import ModelSpec

# Halvings of the largest micro-batch that are rungs.
_MOST_HALVINGS = 5


def ladder(most: int, longest: int) -> tuple[int, ...]:
    """Tokens of micro-batches, ascending: ``longest``, the example that no micro-batch can be smaller than, then
    halvings of ``most``, and ``most``."""
    halves = [most >> step for step in range(_MOST_HALVINGS + 1)]
    return tuple(sorted({longest, *(size for size in halves if size > longest)}))


class ActivationBudget:
    """Training's memory for activations: what the largest micro-batch takes, or ``available_bytes`` if that is less,
    without what was given away.

    Never given away is what validation and DPO's reference need, which keep nothing but pass through the layers with
    micro-batches of ``most`` tokens. ``longest``: tokens of the longest example.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        most: int,
        longest: int,
        *,
        recompute: bool,
        available_bytes: int | None = None,
    ) -> None:
        sizes = ladder(most, longest)
        self._bytes = {size: activation_bytes(spec, size, dtype, recompute=recompute) for size in sizes}
        self._total = self._bytes[sizes[-1]]
        if available_bytes is not None:
            self._total = min(self._total, available_bytes)
        self._kept_back = min(self._total, passing_bytes(spec, sizes[-1], dtype))
        self.lent_bytes = 0

    @property
    def max_tokens(self) -> int:
        """Tokens of a micro-batch; 0 when not even the smallest has room."""
        left = self._total - self.lent_bytes
        return max((size for size, needed in self._bytes.items() if needed <= left), default=0)

    def require(self, num_bytes: int) -> int:
        """Give away as much of ``num_bytes`` as there is; how much that was."""
        given = min(num_bytes, self._total - self._kept_back - self.lent_bytes)
        self.lent_bytes += given
        return given

    def release(self, num_bytes: int) -> None:
        """Take back what was given away. Raises ValueError for more than that."""
        if num_bytes > self.lent_bytes:
            raise ValueError(f"{num_bytes} bytes given back, but only {self.lent_bytes} were given away")
        self.lent_bytes -= num_bytes
