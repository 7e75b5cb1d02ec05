"""What a training step minimises: how its examples go into micro-batches, and the loss of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from cotenant.finetune.dataset import Dataset
from cotenant.finetune.loss import LossSums, chunks, empty_losses, losses_and_gradient
from cotenant.finetune.microbatch import MicroBatch, MicroBatchShape, split
from cotenant.models.decoder import Decoder


class Objective(Protocol):
    """A loss that is a sum over micro-batches divided by a weight of the whole step, ``total_weight``, so that their
    gradients simply add up. It depends on a micro-batch through the losses of its targets alone."""

    def split(self, dataset: Dataset, examples: Sequence[int], max_tokens: int) -> tuple[MicroBatchShape, ...]:
        """Micro-batches of at most ``max_tokens`` tokens, or of what must stay together. Depends on nothing else."""
        ...

    def total_weight(self, dataset: Dataset, examples: Sequence[int]) -> float:
        """What the step's summed loss is divided by."""
        ...

    def scales(self, micro_batch: MicroBatch, total_weight: float) -> torch.Tensor:
        """What the gradient of each target's own loss is multiplied by as it is computed [targets], float32."""
        ...

    def finish(
        self,
        micro_batch: MicroBatch,
        total_weight: float,
        nll: torch.Tensor,
        correct: torch.Tensor,
        gradient: torch.Tensor,
    ) -> LossSums:
        """The micro-batch's sums, once the losses of all targets are known, ``weighted_nll`` that of this loss.
        ``nll`` and ``correct`` [targets]: as of ``token_losses``. ``gradient`` [tokens, hidden]: of the targets' own
        losses times ``scales``, and then of this one."""
        ...


@torch.no_grad()
def loss_and_gradient(
    objective: Objective,
    decoder: Decoder,
    hidden: torch.Tensor,
    micro_batch: MicroBatch,
    total_weight: float,
    gradient: torch.Tensor,
) -> LossSums:
    """The micro-batch's sums; ``gradient`` [tokens, hidden], zeros before, becomes that of its loss / ``total_weight``
    at ``hidden``, the last layer's output [tokens, hidden], outside any graph."""
    scales = objective.scales(micro_batch, total_weight)
    nll, correct = empty_losses(len(scales), hidden.device)
    for part in chunks(decoder, len(nll), decoder.dtype):
        rows = micro_batch.rows[part]
        nll[part], correct[part], gradient[rows] = losses_and_gradient(
            decoder, hidden[rows], micro_batch.targets[part], scales[part]
        )
    return objective.finish(micro_batch, total_weight, nll, correct, gradient)


class CrossEntropy:
    """Supervised fine-tuning: the weighted mean negative log-likelihood of the target tokens."""

    def split(self, dataset: Dataset, examples: Sequence[int], max_tokens: int) -> tuple[MicroBatchShape, ...]:
        return split(dataset, examples, max_tokens)

    def total_weight(self, dataset: Dataset, examples: Sequence[int]) -> float:
        return sum(dataset.loss_weights[example] for example in examples)

    def scales(self, micro_batch: MicroBatch, total_weight: float) -> torch.Tensor:
        """A step without weight has gradient 0."""
        return micro_batch.weights / total_weight if total_weight > 0 else micro_batch.weights

    def finish(
        self,
        micro_batch: MicroBatch,
        total_weight: float,
        nll: torch.Tensor,
        correct: torch.Tensor,
        gradient: torch.Tensor,
    ) -> LossSums:
        return LossSums.of(nll, micro_batch.weights, correct)
