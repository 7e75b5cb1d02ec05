"""Weights that have diverged: the error, and what looks for them where no validation file tells."""

from __future__ import annotations

import math

import torch

from cotenant.core.job import StepMetrics
from cotenant.core.tasklet import TaskletCycle, TaskletShape
from cotenant.finetune.dataset import Dataset
from cotenant.finetune.forward import ForwardPasses
from cotenant.finetune.loss import LossSums, evaluation_loss
from cotenant.finetune.microbatch import MicroBatch, split
from cotenant.finetune.tasklets import done_once
from cotenant.models.decoder import Decoder
from cotenant.models.lora import LoraAdapter


class TrainingError(Exception):
    """Training cannot go on: with the weights that there are the loss or its gradient is not finite. No later step has
    changed them. ``loss``: the one that was measured."""

    def __init__(self, message: str, loss: float) -> None:
        super().__init__(message)
        self.loss = loss


def check_measured(metrics: StepMetrics) -> None:
    """Raises TrainingError if a loss on the validation file is not finite: were this the job's last step, its weights
    would be the result."""
    for loss in (metrics.valid_loss, metrics.full_valid_loss):
        if loss is not None:
            _check(metrics.step, loss, "on the validation file")


class FinalCheck:
    """In the evaluation's place after the last step of a job without one: the loss of one example is finite. A weight
    that is not shows there, too."""

    def __init__(self, decoder: Decoder, adapter: LoraAdapter, dataset: Dataset, example: int) -> None:
        self._decoder = decoder
        micro_batches = split(dataset, [example], dataset.lengths[example])
        self._passes = ForwardPasses(decoder, adapter, dataset, [micro_batches], split)
        self._sums = LossSums.zero(decoder.device)
        self.num_tokens = dataset.lengths[example]

    @property
    def upcoming(self) -> tuple[TaskletCycle, ...]:
        return self._passes.upcoming

    @property
    def done(self) -> bool:
        return self._passes.done

    @property
    def started(self) -> bool:
        return self._passes.started

    @property
    def num_tokens_left(self) -> int:
        return self._passes.num_tokens_left

    def run_tasklet(self) -> TaskletShape:
        return self._passes.run_tasklet(self._take)

    def discard(self) -> None:
        """Drop the activations; the example runs again."""
        self._passes.discard()

    def limit(self, max_tokens: int) -> None:
        """One example is in no smaller pieces."""

    def add_to(self, metrics: StepMetrics) -> StepMetrics:
        """The step's metrics, as they are. Raises TrainingError if the loss is not finite."""
        assert self.done, "the check is not over"
        weighted_nll, _ = self._sums.read()
        _check(metrics.step, weighted_nll, "with the last step's weights")
        return metrics

    def _take(self, micro_batch: MicroBatch, hidden: torch.Tensor) -> None:
        sums = evaluation_loss(self._decoder, hidden, micro_batch)
        with done_once():
            self._sums += sums


def example_to_check(dataset: Dataset, examples: tuple[int, ...]) -> int:
    """The shortest of a step's examples, of those that count in the loss if one does."""
    counting = [example for example in examples if dataset.num_targets[example]]
    return min(counting or examples, key=lambda example: dataset.lengths[example])


def _check(step: int, loss: float, where: str) -> None:
    if not math.isfinite(loss):
        raise TrainingError(f"The loss is not finite at step {step}: {where} it is {loss:.6g}.", loss)
