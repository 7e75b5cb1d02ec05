"""Validation as tasklets: one batch while training goes on, all of it at the end of an epoch."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from cotenant.core.job import StepMetrics
from cotenant.core.tasklet import TaskletKind, TaskletRun, TaskletShape
from cotenant.finetune.dataset import Dataset
from cotenant.finetune.loss import LossSums
from cotenant.finetune.microbatch import MicroBatchShape, build, split
from cotenant.finetune.tasklets import Cursor, EvaluationPass, forward_and_loss_runs
from cotenant.models.decoder import Decoder
from cotenant.models.lora import LoraAdapter

_RUNS_PER_MICRO_BATCH = 2  # forward layers, loss


class ValidationSet:
    """A validation file in micro-batches: those of the fixed batch that ``valid_loss`` is measured on, then the rest.

    The batch is ``batch_size`` examples drawn once with the job's seed, so its loss can be followed over the steps.
    """

    def __init__(self, dataset: Dataset, *, batch_size: int, seed: int, max_tasklet_tokens: int) -> None:
        order = list(range(len(dataset)))
        random.Random(f"validation/{seed}").shuffle(order)
        drawn, rest = order[:batch_size], order[batch_size:]
        self.dataset = dataset
        self.batch = split(dataset, drawn, max_tasklet_tokens)
        self.rest = split(dataset, rest, max_tasklet_tokens)
        self.batch_weight = sum(dataset.loss_weights[example] for example in drawn)
        self.full_weight = sum(dataset.loss_weights)


@dataclass(frozen=True, slots=True)
class _Figures:
    loss: float
    accuracy: float


class Evaluation:
    """One pass over the validation batch, or with ``full`` over the whole set (whose first part is the batch)."""

    def __init__(self, decoder: Decoder, adapter: LoraAdapter, validation: ValidationSet, *, full: bool) -> None:
        self._decoder = decoder
        self._adapter = adapter
        self._validation = validation
        self._full = full
        self._micro_batches = validation.batch + validation.rest if full else validation.batch
        self._cursor = Cursor(tuple(run for shape in self._micro_batches for run in self._runs(shape)))
        self._pass: EvaluationPass | None = None
        self._sums = LossSums.zero(decoder.device)
        self._batch_figures: _Figures | None = None

    @property
    def upcoming(self) -> tuple[TaskletRun, ...]:
        return self._cursor.remaining

    @property
    def done(self) -> bool:
        return self._cursor.done

    @property
    def started(self) -> bool:
        return self._pass is not None

    def run_tasklet(self) -> TaskletShape:
        shape = self._cursor.shape
        index = self._cursor.run // _RUNS_PER_MICRO_BATCH
        if self._pass is None:
            micro_batch = build(
                self._validation.dataset, self._micro_batches[index], self._adapter, self._decoder.device
            )
            self._pass = EvaluationPass(self._decoder, micro_batch)
        self._adapter.dropout_seed = None
        if shape.kind is TaskletKind.EVAL_FORWARD:
            self._pass.forward(self._cursor.within)
        else:
            self._sums += self._pass.loss()
            self._pass = None
            if index + 1 == len(self._validation.batch):
                self._batch_figures = self._figures(self._validation.batch_weight)
        self._cursor.advance()
        return shape

    def discard(self) -> None:
        """Drop the activations; the micro-batch in flight runs again, those before it stay counted."""
        self._pass = None
        self._cursor.seek(self._cursor.run // _RUNS_PER_MICRO_BATCH * _RUNS_PER_MICRO_BATCH)

    def add_to(self, metrics: StepMetrics) -> StepMetrics:
        """The step's metrics with the figures measured here."""
        assert self.done, "the evaluation is not over"
        if self._batch_figures is not None:
            metrics = replace(
                metrics,
                valid_loss=self._batch_figures.loss,
                valid_mean_token_accuracy=self._batch_figures.accuracy,
            )
        if self._full:
            full = self._figures(self._validation.full_weight)
            if full is not None:
                metrics = replace(metrics, full_valid_loss=full.loss, full_valid_mean_token_accuracy=full.accuracy)
        return metrics

    def _figures(self, weight: float) -> _Figures | None:
        """None where no token counts, so there is nothing to measure."""
        if weight <= 0:
            return None
        return _Figures(float(self._sums.weighted_nll) / weight, self._sums.accuracy())

    def _runs(self, shape: MicroBatchShape) -> tuple[TaskletRun, ...]:
        num_layers = self._decoder.spec.num_layers
        return forward_and_loss_runs(TaskletKind.EVAL_FORWARD, TaskletKind.EVAL_LOSS, num_layers, shape)
