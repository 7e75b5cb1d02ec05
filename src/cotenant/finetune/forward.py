"""Micro-batches through the decoder without gradients, as tasklets: validation, and DPO's reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cotenant.core.tasklet import TaskletCycle, TaskletKind, TaskletRun, TaskletShape, runs_of
from cotenant.finetune.activations import Activations, CapturedPass
from cotenant.finetune.captured import FORWARD_PARTS, PassKind, captured_loss_run
from cotenant.finetune.dataset import Dataset
from cotenant.finetune.microbatch import MicroBatch, MicroBatchShape, Split, build, fits
from cotenant.finetune.tasklets import Cursor, EvaluationPass, loss_run
from cotenant.models.decoder import Decoder
from cotenant.models.lora import LoraAdapter

Take = Callable[[MicroBatch, torch.Tensor, torch.Tensor], None]


class ForwardPasses:
    """Runs at least one micro-batch. ``adapter`` None: the base alone. Dropout is off. ``activations``: where layers
    are captured; None: they run eagerly.

    ``parts``: micro-batches, in the order in which they run; however they are cut later, by ``split``, none has
    examples of two parts.
    """

    def __init__(
        self,
        decoder: Decoder,
        adapter: LoraAdapter | None,
        dataset: Dataset,
        parts: Sequence[Sequence[MicroBatchShape]],
        split: Split,
        activations: Activations | None = None,
    ) -> None:
        self._decoder = decoder
        self._adapter = adapter
        self._dataset = dataset
        self._split = split
        self._activations = activations
        self._pass: EvaluationPass | CapturedPass | None = None
        self._set(parts)

    def _set(self, parts: Sequence[Sequence[MicroBatchShape]]) -> None:
        self._parts = tuple(parts)
        self._micro_batches = tuple(shape for part in parts for shape in part)
        each = [self._cycles(shape) for shape in self._micro_batches]
        self._runs_per_micro_batch = sum(1 for _ in runs_of(each[0]))
        self._cursor = Cursor(tuple(cycle for cycles in each for cycle in cycles))

    @property
    def upcoming(self) -> tuple[TaskletCycle, ...]:
        return self._cursor.remaining

    @property
    def next_shape(self) -> TaskletShape:
        return self._cursor.shape

    @property
    def is_last(self) -> bool:
        """Whether the next tasklet is the last one."""
        return self._cursor.is_last

    @property
    def done(self) -> bool:
        return self._cursor.done

    @property
    def num_tokens_left(self) -> int:
        """Of the micro-batches that are not done."""
        return sum(shape.num_tokens for shape in self._micro_batches[self._num_done :])

    @property
    def started(self) -> bool:
        """Whether there are activations that a discard would free."""
        return self._pass is not None

    def run_tasklet(self, take: Take) -> TaskletShape:
        """``take`` gets a micro-batch's tensors and what ``token_losses`` gives, in the last tasklet of its loss."""
        shape = self._cursor.shape
        current = self._pass = self._begin() if self._pass is None else self._pass
        if self._adapter is not None:
            self._adapter.dropout_masks = None
        if shape.kind is not TaskletKind.EVAL_LOSS:
            if isinstance(current, EvaluationPass):
                current.forward()
            else:
                current.run(shape.kind)
        else:
            if isinstance(current, CapturedPass):
                if self._cursor.within == 0:
                    current.begin_loss()
                current.loss_part(self._cursor.within)
            if self._cursor.ends_run:
                take(current.micro_batch, *current.losses())
                self._pass = None
        self._cursor.advance()
        return shape

    def _begin(self) -> EvaluationPass | CapturedPass:
        """The next micro-batch."""
        shape = self._micro_batches[self._num_done]
        micro_batch = build(self._dataset, shape, self._adapter, self._decoder.device)
        if self._activations is None:
            return EvaluationPass(self._decoder, micro_batch)
        return self._activations.begin(micro_batch, PassKind(None, has_adapter=self._adapter is not None))

    def discard(self) -> None:
        """Drop the activations; the micro-batch in flight runs again, those before it stay done."""
        self._pass = None
        self._cursor.seek(self._num_done * self._runs_per_micro_batch)

    def limit(self, max_tokens: int) -> None:
        """Cut what is not done yet into micro-batches of at most so many tokens, in each part where one has more. If
        that is the one in flight and can be cut, it starts again."""
        num_kept = self._num_done
        if self._pass is not None and fits(self._micro_batches[num_kept], self._dataset, max_tokens, self._split):
            num_kept += 1
        else:
            self.discard()
        parts = []
        for part in self._parts:
            kept, rest = part[:num_kept], part[num_kept:]
            num_kept -= len(kept)
            if not all(fits(shape, self._dataset, max_tokens, self._split) for shape in rest):
                rest = self._split(self._dataset, [example for shape in rest for example in shape.examples], max_tokens)
            parts.append((*kept, *rest))
        run, within = self._cursor.run, self._cursor.within
        self._set(parts)
        self._cursor.seek(run, within)

    @property
    def _num_done(self) -> int:
        """Micro-batches done: the index of the one in flight."""
        return self._cursor.run // self._runs_per_micro_batch

    def _cycles(self, shape: MicroBatchShape) -> tuple[TaskletCycle, TaskletCycle]:
        num_layers = self._decoder.spec.num_layers
        if self._activations is None:
            forward = TaskletShape(TaskletKind.EVAL_FORWARD, shape.num_tokens, shape.max_length)
            loss = loss_run(TaskletKind.EVAL_LOSS, shape)
            return TaskletCycle((TaskletRun(forward, num_layers),)), TaskletCycle((loss,))
        parts = (TaskletShape(kind, shape.num_tokens, shape.max_length) for kind in FORWARD_PARTS)
        layers = TaskletCycle(tuple(TaskletRun(part, 1) for part in parts), num_layers)
        return layers, TaskletCycle((captured_loss_run(TaskletKind.EVAL_LOSS, shape),))
