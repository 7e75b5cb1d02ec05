"""A dropout mask is the same on every device."""

from __future__ import annotations

import pytest
import torch

from cotenant.models.dropout import DropoutMasks, token_keys


@pytest.mark.parametrize("num_columns", [64, 4096, 14336])
def test_masks_equal_the_cpus(num_columns: int) -> None:
    """Of one token and of more tokens than are hashed at a time."""
    for lengths in ([1], [700, 37]):
        keys = token_keys([f"example {index}" for index in range(len(lengths))], lengths)
        found = []
        for device in ("cpu", "cuda"):
            like = torch.zeros(sum(lengths), num_columns, dtype=torch.bfloat16, device=device)
            masks = DropoutMasks(keys.to(device), 0.1)
            found.append([masks.mask(layer, "q_proj", like).cpu() for layer in (0, 31)])
        for ours, expected in zip(*found, strict=True):
            assert torch.equal(ours, expected)
        if num_columns * sum(lengths) > 10_000:
            assert (found[0][0] == 0).float().mean() == pytest.approx(0.1, abs=0.01)
