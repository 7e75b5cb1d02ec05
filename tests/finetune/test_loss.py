"""The loss of rows from the last hidden state."""

from __future__ import annotations

import pytest
import torch

from cotenant.finetune.loss import losses_and_gradient
from cotenant.models.decoder import Decoder


@torch.no_grad()
@pytest.mark.parametrize("size", [1e25, 1e38])
def test_a_row_that_has_grown_too_large_for_its_norm_has_no_loss(decoder: Decoder, size: float) -> None:
    """Its logits would all be 0, and a job that has diverged would go on with a loss that looks like one."""
    hidden = torch.randn(3, decoder.spec.hidden_size)
    targets, scales = torch.tensor([5, 6, 7]), torch.ones(3)
    expected = torch.nn.functional.cross_entropy(decoder.logits(hidden), targets, reduction="none")
    plain, _, _ = losses_and_gradient(decoder, hidden, targets, scales)
    assert torch.equal(plain, expected)
    hidden[1] = size
    losses, _, _ = losses_and_gradient(decoder, hidden, targets, scales)
    assert losses.isnan().tolist() == [False, True, False]
    assert torch.equal(losses[::2], expected[::2])
