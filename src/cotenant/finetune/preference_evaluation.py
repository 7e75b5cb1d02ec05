"""Validation on pairs of answers: DPO's loss and rewards, of one batch or of all of the file."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from cotenant.core.job import StepMetrics
from cotenant.core.tasklet import TaskletCycle, TaskletShape
from cotenant.finetune.activations import Activations
from cotenant.finetune.dataset import Dataset
from cotenant.finetune.forward import ForwardPasses
from cotenant.finetune.loss import LossSums
from cotenant.finetune.microbatch import MicroBatch, MicroBatchShape
from cotenant.finetune.preference import PreferenceLoss, Scores, pairs_of, score, split_pairs
from cotenant.finetune.tasklets import done_once
from cotenant.models.decoder import Decoder
from cotenant.models.lora import LoraAdapter


class PreferenceValidationSet:
    """As ``ValidationSet``, in pairs. The base's scores are kept once measured: unless memory is short, a validation
    micro-batch is always the same, and so are its bits."""

    def __init__(
        self, dataset: Dataset, loss: PreferenceLoss, *, batch_size: int, seed: int, max_tasklet_tokens: int
    ) -> None:
        order = list(range(0, len(dataset), 2))
        random.Random(f"validation/{seed}").shuffle(order)
        drawn, rest = (
            [sequence for first in part for sequence in (first, first + 1)]
            for part in (order[:batch_size], order[batch_size:])
        )
        self.dataset = dataset
        self.loss = loss
        self.batch_sequences, self.all_sequences = tuple(drawn), tuple(drawn + rest)
        self.num_batch_tokens = sum(dataset.lengths[sequence] for sequence in drawn)
        self.num_tokens = sum(dataset.lengths)
        self.longest = max(dataset.lengths[first] + dataset.lengths[first + 1] for first in order)
        self.reference: Scores = {}
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
    ) -> PreferenceEvaluation:
        """A measurement to run, in micro-batches of at most ``max_tokens`` tokens. ``activations``: where layers are
        captured."""
        limit = min(max_tokens, self._max_tokens)
        return PreferenceEvaluation(decoder, adapter, self, full=full, max_tokens=limit, activations=activations)

    def _parts(self, max_tokens: int) -> tuple[tuple[MicroBatchShape, ...], ...]:
        """The batch's micro-batches, then the rest's."""
        parts = self.batch_sequences, self.all_sequences[len(self.batch_sequences) :]
        return tuple(split_pairs(self.dataset, part, max_tokens) for part in parts)


class PreferenceEvaluation:
    """The base's scores, where they are not known yet, then the adapter's; of the batch, or with ``full`` of all."""

    def __init__(
        self,
        decoder: Decoder,
        adapter: LoraAdapter,
        validation: PreferenceValidationSet,
        *,
        full: bool,
        max_tokens: int,
        activations: Activations | None,
    ) -> None:
        self._validation = validation
        self._full = full
        dataset, parts = validation.dataset, validation.parts(max_tokens)
        parts = parts if full else parts[:1]
        unknown = [[shape for shape in part if shape.examples[0] not in validation.reference] for part in parts]
        self._reference = None
        if any(unknown):
            self._reference = ForwardPasses(decoder, None, dataset, unknown, split_pairs, activations)
        self._policy = ForwardPasses(decoder, adapter, dataset, parts, split_pairs, activations)
        self._phases = [phase for phase in (self._reference, self._policy) if phase is not None]
        self.num_tokens = sum(shape.num_tokens for part in (*unknown, *parts) for shape in part)
        self._scores: Scores = {}
        self._sums = LossSums.zero(decoder.device)
        self._num_measured = 0  # sequences, under the adapter
        self._batch_sums = LossSums.zero(decoder.device)

    @property
    def upcoming(self) -> tuple[TaskletCycle, ...]:
        return tuple(cycle for phase in self._phases for cycle in phase.upcoming)

    @property
    def next_shape(self) -> TaskletShape:
        return next(phase.next_shape for phase in self._phases if not phase.done)

    @property
    def is_last(self) -> bool:
        """Whether the next tasklet is the last one. No other waits for the device."""
        return self._policy.is_last

    @property
    def done(self) -> bool:
        return self._policy.done

    @property
    def started(self) -> bool:
        return any(phase.started for phase in self._phases)

    @property
    def num_tokens_left(self) -> int:
        """Of ``num_tokens``, those whose micro-batches are not done."""
        return sum(phase.num_tokens_left for phase in self._phases)

    def run_tasklet(self) -> TaskletShape:
        if self._reference is not None and not self._reference.done:
            return self._reference.run_tasklet(self._take_reference)
        return self._policy.run_tasklet(self._take)

    def discard(self) -> None:
        """Drop the activations; the micro-batch in flight runs again, those before it stay counted."""
        for phase in self._phases:
            phase.discard()

    def limit(self, max_tokens: int) -> None:
        """See ``ForwardPasses.limit``."""
        for phase in self._phases:
            phase.limit(max_tokens)

    def add_to(self, metrics: StepMetrics) -> StepMetrics:
        """The step's metrics with the figures measured here."""
        assert self.done, "the evaluation is not over"
        validation = self._validation
        policy, reference = self._pairs(validation.batch_sequences)
        metrics = replace(
            metrics,
            valid_loss=float(validation.loss.losses(policy, reference).mean()),
            valid_mean_token_accuracy=self._batch_sums.accuracy(),
            valid_preference=validation.loss.metrics(policy, reference),
        )
        if not self._full:
            return metrics
        policy, reference = self._pairs(validation.all_sequences)
        return replace(
            metrics,
            full_valid_loss=float(validation.loss.losses(policy, reference).mean()),
            full_valid_mean_token_accuracy=self._sums.accuracy(),
            full_valid_preference=validation.loss.metrics(policy, reference),
        )

    def _pairs(self, sequences: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return pairs_of(self._scores, sequences), pairs_of(self._validation.reference, sequences)

    def _take(self, micro_batch: MicroBatch, nll: torch.Tensor, correct: torch.Tensor) -> None:
        scores, sums = score(self._validation.dataset, micro_batch, nll, correct)
        self._scores.update(scores)
        with done_once():
            self._sums += sums
            self._num_measured += len(micro_batch.examples)
            if self._num_measured == len(self._validation.batch_sequences):
                self._batch_sums = self._sums.copy()

    def _take_reference(self, micro_batch: MicroBatch, nll: torch.Tensor, correct: torch.Tensor) -> None:
        scores, _ = score(self._validation.dataset, micro_batch, nll, correct)
        self._validation.reference.update(scores)
