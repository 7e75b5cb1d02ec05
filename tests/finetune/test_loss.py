"""The loss of rows from the last hidden state."""

from __future__ import annotations

import pytest
import torch

from cotenant.finetune import loss
from cotenant.finetune.captured_loss import CapturedLoss, num_parts
from cotenant.finetune.loss import losses_and_gradient, token_losses
from cotenant.finetune.microbatch import MicroBatch
from cotenant.models.batch import Batch, TrainingSegment
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


@torch.no_grad()
@pytest.mark.parametrize("size", [1e25, 1e38])
def test_such_a_row_has_no_loss_in_an_evaluation_either(decoder: Decoder, size: float) -> None:
    hidden = torch.randn(3, decoder.spec.hidden_size)
    micro_batch = _micro_batch(targets=[5, 6, 7])
    expected = torch.nn.functional.cross_entropy(decoder.logits(hidden), micro_batch.targets, reduction="none")
    losses, _ = token_losses(decoder, hidden, micro_batch)
    assert torch.equal(losses, expected)
    hidden[1] = size
    losses, _ = token_losses(decoder, hidden, micro_batch)
    assert losses.isnan().tolist() == [False, True, False]
    assert torch.equal(losses[::2], expected[::2])


@torch.no_grad()
def test_without_gradients_a_part_of_any_size_takes_a_bounded_piece_of_logits(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    most_rows, really = 10, decoder.logits
    monkeypatch.setattr(loss, "_CHUNK_BYTES", most_rows * decoder.spec.vocab_size * 4)
    asked: list[int] = []
    monkeypatch.setattr(decoder, "logits", lambda inputs: asked.append(len(inputs)) or really(inputs))
    hidden = torch.randn(300, decoder.spec.hidden_size)
    micro_batch = _micro_batch(targets=[place % 50 for place in range(300)])
    captured = CapturedLoss(decoder, hidden, None, None)
    captured.begin(micro_batch)
    for part in range(num_parts(300, 300)):
        captured.run(part)
    assert max(asked) == most_rows
    for ours, theirs in zip(captured.losses(), token_losses(decoder, hidden, micro_batch), strict=True):
        torch.testing.assert_close(ours, theirs)


def _micro_batch(targets: list[int]) -> MicroBatch:
    """One whose every row predicts a target, of weight 1."""
    count = len(targets)
    segment, rows = TrainingSegment((count,)), torch.arange(count)
    batch = Batch(token_ids=rows, positions=rows, segments=(segment,), spans=())
    return MicroBatch((0,), batch, segment, rows, torch.tensor(targets), torch.ones(count))
