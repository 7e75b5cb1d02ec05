"""Dropout masks by counting: an element is a hash of its token's key, its layer and module, and its column.

So a mask does not depend on which tokens share a micro-batch, nor on how often it is made, and a backward pass makes it
again instead of keeping it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from cotenant.device.upload import upload
from cotenant.models.products import runs_kernels

# Elements whose hashes are in memory at a time, four bytes each and twice: as many as a CPU's cache holds, or as are
# worth a launch.
_CPU_ELEMENTS = 1 << 18
_DEVICE_ELEMENTS = 1 << 21
# Odd, with bits set at random: its multiples spread what differs in any bits over the highest ones. As int32.
_MULTIPLIER = 0x846CA68B - (1 << 32)


def token_keys(names: Sequence[str], lengths: Sequence[int]) -> torch.Tensor:
    """A key for each token of sequences, from its sequence's name and its position there: [tokens], int32."""
    starts = [int.from_bytes(_digest(name), "little") for name in names]
    keys = [np.uint64(start) + _multiples(length) for start, length in zip(starts, lengths, strict=True)]
    return _spread(np.concatenate(keys))


class DropoutMasks:
    """The masks of a micro-batch's tokens. ``keys`` [tokens]: of ``token_keys``, on the tokens' device;
    ``probability``: of an element to be dropped."""

    def __init__(self, keys: torch.Tensor, probability: float) -> None:
        self._keys = keys
        self._probability = probability
        self._dropped_below = min(round(probability * 2**32) - 2**31, 2**31 - 1)
        self._columns: dict[int, torch.Tensor] = {}  # by their number: [columns], int32

    def mask(self, layer: int, module: str, like: torch.Tensor) -> torch.Tensor:
        """What to multiply a module's input by, which has the shape [tokens, in] and the dtype of ``like``: 0 or
        1 / (1 - p) for each element."""
        assert len(like) == len(self._keys), "every token has a key"
        columns, rows = self._column_keys(like.shape[1]), (self._keys * _module_key(layer, module))[:, None]
        mask = torch.empty_like(like, requires_grad=False)
        num_elements = _CPU_ELEMENTS if like.is_cpu else _DEVICE_ELEMENTS
        num_rows = max(1, num_elements // like.shape[1])
        for some_rows, part in zip(rows.split(num_rows), mask.split(num_rows), strict=True):
            hashes = some_rows * columns  # [rows, columns], int32
            hashes ^= hashes >> 15
            hashes *= _MULTIPLIER
            part.copy_(hashes >= self._dropped_below)
        return mask.div_(1.0 - self._probability)

    def apply(self, layer: int, module: str, x: torch.Tensor) -> torch.Tensor:
        """A module's input ``x`` [tokens, in] times its mask, as a new tensor."""
        if runs_kernels(x):
            return self._drop(layer, module, x, None)
        return x * self.mask(layer, module, x)

    def add_applied(self, layer: int, module: str, target: torch.Tensor, values: torch.Tensor) -> None:
        """Add to ``target`` [tokens, in] the ``values``, of its shape, times the mask of a module's input."""
        if runs_kernels(values):
            self._drop(layer, module, values, target)
        else:
            target.addcmul_(values, self.mask(layer, module, values))

    def _drop(self, layer: int, module: str, values: torch.Tensor, add_to: torch.Tensor | None) -> torch.Tensor:
        from cotenant.models.kernels.dropout import drop

        assert len(values) == len(self._keys), "every token has a key"
        columns, module_key = self._column_keys(values.shape[1]), _module_key(layer, module)
        scale = float(torch.ones((), dtype=values.dtype).div_(1.0 - self._probability))
        return drop(values, self._keys, columns, module_key, self._dropped_below, scale, _MULTIPLIER, add_to)

    def _column_keys(self, count: int) -> torch.Tensor:
        if count not in self._columns:
            self._columns[count] = upload(_spread(_multiples(count)), self._keys.device)
        return self._columns[count]


@cache
def _module_key(layer: int, module: str) -> int:
    """An int32 number. Odd times odd is odd, and an odd factor maps no two numbers to one."""
    return int.from_bytes(_digest(f"{layer}/{module}")[:4], "little", signed=True) | 1


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8).digest()


def _multiples(count: int) -> npt.NDArray[np.uint64]:
    return np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def _spread(numbers: npt.NDArray[np.uint64]) -> torch.Tensor:
    """Odd int32 numbers that look random, from any 64-bit ones (Steele et al., SplitMix)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((numbers >> np.uint64(32)).astype(np.uint32) | np.uint32(1)).view(np.int32))
