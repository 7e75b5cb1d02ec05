"""A dropout mask is the same on every device."""

from __future__ import annotations

import pytest
import torch

from cotenant.models.dropout import DropoutMasks, token_keys


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_columns", [64, 1000, 14336])
def test_what_is_dropped_is_what_a_mask_says(num_columns: int, dtype: torch.dtype) -> None:
    """Without a mask being made; bit for bit."""
    keys = token_keys(["an example"], [300]).cuda()
    x, target = (torch.randn(300, num_columns, device="cuda", dtype=dtype) for _ in range(2))
    for layer, module, probability in ((0, "q_proj", 0.1), (31, "down_proj", 0.5)):
        masks = DropoutMasks(keys, probability)
        mask = masks.mask(layer, module, x)
        with torch.no_grad():
            found = masks.apply(layer, module, x)
            added = target.clone()
            masks.add_applied(layer, module, added, x)
        assert torch.equal(found, x * mask)
        expected = target.float() + x.float() * mask.float()
        torch.testing.assert_close(added.float(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


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
