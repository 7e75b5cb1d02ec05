"""What a training step minimises: how its examples go into micro-batches, and the loss of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from cotenant.finetune.dataset import Dataset
from cotenant.finetune.loss import LossSums, loss_and_gradient
from cotenant.finetune.microbatch import MicroBatch, MicroBatchShape, split
from cotenant.models.decoder import Decoder


class Objective(Protocol):
    """A loss that is a sum over micro-batches divided by a weight of the whole step."""

    is_cross_entropy: bool
    """Whether the loss is the weighted mean of the targets' own, which can be taken part by part."""

    def split(self, dataset: Dataset, examples: Sequence[int], max_tokens: int) -> tuple[MicroBatchShape, ...]:
        """Micro-batches of at most ``max_tokens`` tokens, or of what must stay together. Depends on nothing else."""
        ...

    def total_weight(self, dataset: Dataset, examples: Sequence[int]) -> float:
        """What the step's summed loss is divided by."""
        ...

    def loss_and_gradient(
        self,
        decoder: Decoder,
        hidden: torch.Tensor,
        micro_batch: MicroBatch,
        total_weight: float,
        gradient: torch.Tensor,
    ) -> LossSums:
        """As ``loss.loss_and_gradient``; ``weighted_nll`` is here the sum of the loss."""
        ...


class CrossEntropy:
    """Supervised fine-tuning: the weighted mean negative log-likelihood of the target tokens."""

    is_cross_entropy = True

    def split(self, dataset: Dataset, examples: Sequence[int], max_tokens: int) -> tuple[MicroBatchShape, ...]:
        return split(dataset, examples, max_tokens)

    def total_weight(self, dataset: Dataset, examples: Sequence[int]) -> float:
        return sum(dataset.loss_weights[example] for example in examples)

    def loss_and_gradient(
        self,
        decoder: Decoder,
        hidden: torch.Tensor,
        micro_batch: MicroBatch,
        total_weight: float,
        gradient: torch.Tensor,
    ) -> LossSums:
        return loss_and_gradient(decoder, hidden, micro_batch, total_weight, gradient)
