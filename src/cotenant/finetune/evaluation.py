"""Validation as tasklets: one batch while training goes on, all of it at the end of an epoch."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache

import torch

from cotenant.core.job import StepMetrics
from cotenant.core.tasklet import TaskletCycle, TaskletShape
from cotenant.finetune.activations import Activations
from cotenant.finetune.dataset import Dataset
from cotenant.finetune.forward import ForwardPasses
from cotenant.finetune.loss import LossSums
from cotenant.finetune.microbatch import MicroBatch, MicroBatchShape, split
from cotenant.finetune.tasklets import done_once
from cotenant.models.decoder import Decoder
from cotenant.models.lora import LoraAdapter


class ValidationSet:
    """A validation file in two parts: the fixed batch that ``valid_loss`` is measured on, then the rest.

    The batch is ``batch_size`` examples drawn once with the job's seed, so its loss can be followed over the steps.
    Micro-batches have ``max_tasklet_tokens`` tokens at most, or fewer where an evaluation has less memory.
    """

    def __init__(self, dataset: Dataset, *, batch_size: int, seed: int, max_tasklet_tokens: int) -> None:
        order = list(range(len(dataset)))
        random.Random(f"validation/{seed}").shuffle(order)
        drawn = order[:batch_size]
        self.dataset = dataset
        self.batch_size = len(drawn)
        self.batch_weight = sum(dataset.loss_weights[example] for example in drawn)
        self.full_weight = sum(dataset.loss_weights)
        self.num_batch_tokens = sum(dataset.lengths[example] for example in drawn)
        self.num_tokens = sum(dataset.lengths)
        self.longest = max(dataset.lengths)
        self._order = order
        self._max_tokens = max_tasklet_tokens
        self.parts = lru_cache(maxsize=2)(self._parts)

    def evaluation(
        self,
        decoder: Decoder,
        adapter: LoraAdapter,
        *,
        full: bool,
        max_tokens: int,
        activations: Activations | None = None,
    ) -> Evaluation:
        """A measurement to run, in micro-batches of at most ``max_tokens`` tokens. ``activations``: where layers are
        captured."""
        limit = min(max_tokens, self._max_tokens)
        return Evaluation(decoder, adapter, self, full=full, max_tokens=limit, activations=activations)

    def _parts(self, max_tokens: int) -> tuple[tuple[MicroBatchShape, ...], ...]:
        """The batch's micro-batches, then the rest's."""
        parts = self._order[: self.batch_size], self._order[self.batch_size :]
        return tuple(split(self.dataset, part, max_tokens) for part in parts)


class Evaluation:
    """One pass over the validation batch, or with ``full`` over the whole set (whose first part is the batch)."""

    def __init__(
        self,
        decoder: Decoder,
        adapter: LoraAdapter,
        validation: ValidationSet,
        *,
        full: bool,
        max_tokens: int,
        activations: Activations | None,
    ) -> None:
        self._validation = validation
        self._full = full
        parts = validation.parts(max_tokens)
        parts = parts if full else parts[:1]
        self._passes = ForwardPasses(decoder, adapter, validation.dataset, parts, split, activations)
        self.num_tokens = validation.num_tokens if full else validation.num_batch_tokens
        self._sums = LossSums.zero(decoder.device)
        self._num_measured = 0  # examples
        self._batch_sums: LossSums | None = None

    @property
    def upcoming(self) -> tuple[TaskletCycle, ...]:
        return self._passes.upcoming

    @property
    def next_shape(self) -> TaskletShape:
        return self._passes.next_shape

    @property
    def is_last(self) -> bool:
        """Whether the next tasklet is the last one. No other waits for the device."""
        return self._passes.is_last

    @property
    def done(self) -> bool:
        return self._passes.done

    @property
    def started(self) -> bool:
        return self._passes.started

    @property
    def num_tokens_left(self) -> int:
        """Of ``num_tokens``, those whose micro-batches are not done."""
        return self._passes.num_tokens_left

    def run_tasklet(self) -> TaskletShape:
        return self._passes.run_tasklet(self._take)

    def discard(self) -> None:
        """Drop the activations; the micro-batch in flight runs again, those before it stay counted."""
        self._passes.discard()

    def limit(self, max_tokens: int) -> None:
        """See ``ForwardPasses.limit``."""
        self._passes.limit(max_tokens)

    def add_to(self, metrics: StepMetrics) -> StepMetrics:
        """The step's metrics with the figures measured here."""
        assert self.done, "the evaluation is not over"
        # Where no token counts there is nothing to measure.
        if self._batch_sums is not None and self._validation.batch_weight > 0:
            weighted_nll, accuracy = self._batch_sums.read()
            loss = weighted_nll / self._validation.batch_weight
            metrics = replace(metrics, valid_loss=loss, valid_mean_token_accuracy=accuracy)
        if self._full and self._validation.full_weight > 0:
            weighted_nll, accuracy = self._sums.read()
            loss = weighted_nll / self._validation.full_weight
            metrics = replace(metrics, full_valid_loss=loss, full_valid_mean_token_accuracy=accuracy)
        return metrics

    def _take(self, micro_batch: MicroBatch, nll: torch.Tensor, correct: torch.Tensor) -> None:
        sums = LossSums.of(nll, micro_batch.weights, correct)
        with done_once():
            self._sums += sums
            self._num_measured += len(micro_batch.examples)
            if self._num_measured == self._validation.batch_size:
                self._batch_sums = self._sums.copy()
