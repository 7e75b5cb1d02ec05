"""Micro-batches through the decoder without gradients, as tasklets: validation, and DPO's reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cotenant.core.tasklet import TaskletCycle, TaskletKind, TaskletRun, TaskletShape
from cotenant.finetune.dataset import Dataset
from cotenant.finetune.microbatch import MicroBatch, MicroBatchShape, build
from cotenant.finetune.tasklets import Cursor, EvaluationPass, loss_run
from cotenant.models.decoder import Decoder
from cotenant.models.lora import LoraAdapter

_RUNS_PER_MICRO_BATCH = 2  # forward layers, loss

Take = Callable[[int, MicroBatch, torch.Tensor], None]


class ForwardPasses:
    """Runs at least one micro-batch. ``adapter`` None: the base alone. Dropout is off."""

    def __init__(
        self,
        decoder: Decoder,
        adapter: LoraAdapter | None,
        dataset: Dataset,
        micro_batches: Sequence[MicroBatchShape],
    ) -> None:
        self._decoder = decoder
        self._adapter = adapter
        self._dataset = dataset
        self._micro_batches = tuple(micro_batches)
        self._cursor = Cursor(tuple(self._cycle(shape) for shape in self._micro_batches))
        self._pass: EvaluationPass | None = None

    @property
    def upcoming(self) -> tuple[TaskletCycle, ...]:
        return self._cursor.remaining

    @property
    def next_shape(self) -> TaskletShape:
        return self._cursor.shape

    @property
    def done(self) -> bool:
        return self._cursor.done

    @property
    def started(self) -> bool:
        """Whether there are activations that a discard would free."""
        return self._pass is not None

    def run_tasklet(self, take: Take) -> TaskletShape:
        """``take`` gets a micro-batch's number, tensors and last hidden state [tokens, hidden] in its loss tasklet."""
        shape = self._cursor.shape
        index = self._cursor.run // _RUNS_PER_MICRO_BATCH
        if self._pass is None:
            micro_batch = build(self._dataset, self._micro_batches[index], self._adapter, self._decoder.device)
            self._pass = EvaluationPass(self._decoder, micro_batch)
        if self._adapter is not None:
            self._adapter.dropout_masks = None
        if shape.kind is TaskletKind.EVAL_FORWARD:
            self._pass.forward(self._cursor.within)
        else:
            take(index, self._pass.micro_batch, self._pass.output)
            self._pass = None
        self._cursor.advance()
        return shape

    def discard(self) -> None:
        """Drop the activations; the micro-batch in flight runs again, those before it stay done."""
        self._pass = None
        self._cursor.seek(self._cursor.run // _RUNS_PER_MICRO_BATCH * _RUNS_PER_MICRO_BATCH)

    def _cycle(self, shape: MicroBatchShape) -> TaskletCycle:
        forward = TaskletShape(TaskletKind.EVAL_FORWARD, shape.num_tokens, shape.max_length)
        layers = TaskletRun(forward, self._decoder.spec.num_layers)
        return TaskletCycle((layers, loss_run(TaskletKind.EVAL_LOSS, shape)))
