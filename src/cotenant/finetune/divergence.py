"""Weights that have diverged: the error, and what looks for them where no validation file tells."""

from __future__ import annotations

import math

import torch

from cotenant.core.job import StepMetrics
from cotenant.finetune.activations import Activations
from cotenant.finetune.dataset import Dataset
from cotenant.finetune.evaluation import Evaluation, ValidationSet
from cotenant.models.decoder import Decoder
from cotenant.models.lora import LoraAdapter


class TrainingError(Exception):
    """Training cannot go on: with the weights that there are the loss or its gradient is not finite. No later step has
    changed them. ``is_lost``: whether it is the loss, so that they are worth nothing."""

    def __init__(self, message: str, *, is_lost: bool) -> None:
        super().__init__(message)
        self.is_lost = is_lost


def check_trained(step: int, loss: float, grad_norm: float) -> None:
    """Raises TrainingError if a step's loss or its gradient's norm is not finite. The norm before the last layer makes
    a loss out of what has overflowed; its gradient tells."""
    if not math.isfinite(loss):
        raise TrainingError(f"The loss is not finite at step {step}: it is {loss:.6g}.", is_lost=True)
    if not math.isfinite(grad_norm):
        raise TrainingError(
            f"The loss is not finite at step {step}, judged by its gradient: the norm of that is {grad_norm:.6g}, "
            f"with a loss of {loss:.6g}.",
            is_lost=False,
        )


def check_measured(metrics: StepMetrics) -> None:
    """Raises TrainingError if a loss on the validation file is not finite: were this the job's last step, its weights
    would be the result."""
    for loss in (metrics.valid_loss, metrics.full_valid_loss):
        if loss is not None:
            _check(metrics.step, loss, "on the validation file")


class FinalCheck(Evaluation):
    """In the evaluation's place after the last step of a job without one: the loss of one example is finite. A weight
    that is not shows there, too."""

    def __init__(
        self,
        decoder: Decoder,
        adapter: LoraAdapter,
        dataset: Dataset,
        example: int,
        activations: Activations | None = None,
    ) -> None:
        alone, length = dataset[example], dataset.lengths[example]
        dataset = Dataset(alone.token_ids, alone.weights, torch.tensor([0, length]), length)
        measured = ValidationSet(dataset, batch_size=1, seed=0, max_tasklet_tokens=length)
        super().__init__(decoder, adapter, measured, full=False, max_tokens=length, activations=activations)

    def add_to(self, metrics: StepMetrics) -> StepMetrics:
        """The step's metrics, as they are. Raises TrainingError if the loss is not finite."""
        loss = super().add_to(metrics).valid_loss
        if loss is not None:
            _check(metrics.step, loss, "with the last step's weights")
        return metrics


def example_to_check(dataset: Dataset, examples: tuple[int, ...]) -> int:
    """The shortest of a step's examples, of those that count in the loss if one does."""
    counting = [example for example in examples if dataset.num_targets[example]]
    return min(counting or examples, key=lambda example: dataset.lengths[example])


def _check(step: int, loss: float, where: str) -> None:
    if not math.isfinite(loss):
        raise TrainingError(f"The loss is not finite at step {step}: {where} it is {loss:.6g}.", is_lost=True)
