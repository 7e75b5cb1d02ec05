"""The micro-batches of one optimizer step in flight: tasklets that change no training state."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from cotenant.core.tasklet import TaskletCycle, TaskletKind, TaskletRun, TaskletShape, runs_of
from cotenant.device.upload import upload
from cotenant.finetune.activations import Activations, CapturedPass
from cotenant.finetune.captured import BACKWARD_PARTS, FORWARD_PARTS, RECOMPUTE_PARTS, PassKind, captured_loss_run
from cotenant.finetune.dataset import Dataset
from cotenant.finetune.loss import LossSums
from cotenant.finetune.microbatch import MicroBatch, MicroBatchShape, build, fits
from cotenant.finetune.objective import Objective
from cotenant.finetune.tasklets import Cursor, TrainingPass, done_once, loss_run
from cotenant.models.decoder import Decoder
from cotenant.models.dropout import DropoutMasks, token_keys
from cotenant.models.lora import LoraAdapter
from cotenant.models.tape import LayerTape


@dataclass(frozen=True, slots=True)
class StepFigures:
    """``loss``: the objective's mean; ``accuracy``: the share of target tokens that were the most likely token."""

    loss: float
    accuracy: float
    grad_norm: float


class TrainingStep:
    """Accumulates the gradient of one effective batch in the adapter's weights, tasklet by tasklet.

    ``examples`` are the step's examples in the dataset. ``discard`` forgets the micro-batch in flight, which starts
    again; those before it stay done. The gradient comes out multiplied by ``gradient_scale``.
    """

    def __init__(
        self,
        decoder: Decoder,
        adapter: LoraAdapter,
        dataset: Dataset,
        examples: Sequence[int],
        *,
        step_index: int,
        seed: int,
        max_tasklet_tokens: int,
        num_recomputed: int = 0,
        objective: Objective,
        activations: Activations | None = None,
    ) -> None:
        """``num_recomputed``: so many layers keep their inputs alone. ``activations``: where layers are captured; None:
        they run eagerly."""
        self._num_recomputed = num_recomputed
        self._activations = activations
        self._objective = objective
        self._decoder = decoder
        self._adapter = adapter
        self._dataset = dataset
        self._step_index = step_index
        self._seed = seed
        self._set(objective.split(dataset, examples, max_tasklet_tokens))
        self._pass: TrainingPass | CapturedPass | None = None
        self._prepared: MicroBatch | None = None  # the next one, built ahead
        self.total_weight = objective.total_weight(dataset, examples)
        self.gradient_scale = _gradient_scale(decoder.dtype, self.total_weight)
        self.num_tokens = sum(shape.num_tokens for shape in self._micro_batches)
        self._sums = LossSums.zero(decoder.device)  # of the micro-batches done
        self._current_sums = LossSums.zero(decoder.device)

    @property
    def num_forward_tokens(self) -> int:
        """Tokens that go forward through the layers, each as often as it does."""
        return self.num_tokens

    @property
    def num_tokens_done(self) -> int:
        """Of ``num_tokens``, those whose micro-batches are done."""
        return sum(shape.num_tokens for shape in self._micro_batches[: self._num_done])

    @property
    def upcoming(self) -> tuple[TaskletCycle, ...]:
        return self._cursor.remaining

    @property
    def next_shape(self) -> TaskletShape:
        return self._cursor.shape

    @property
    def done(self) -> bool:
        """Whether the gradient is complete."""
        return self._cursor.done

    @property
    def started(self) -> bool:
        """Whether there are activations that a discard would free."""
        return self._pass is not None

    def figures(self, grad_norm: torch.Tensor) -> StepFigures:
        """Of the micro-batches done. Waits for the device, once. ``grad_norm``: []."""
        weighted_nll, accuracy, norm = self._sums.read(grad_norm)
        # A step without weight has loss 0.
        return StepFigures(weighted_nll / self.total_weight if self.total_weight > 0 else 0.0, accuracy, norm)

    @property
    def next_forward_layer(self) -> int | None:
        """The layer, if the next tasklet is a forward one of a whole layer."""
        if self.done or self._cursor.shape.kind is not TaskletKind.FORWARD:
            return None
        return self._cursor.within

    def run_tasklet(self) -> TaskletShape:
        shape = self._cursor.shape
        current = self._current_pass()
        if shape.kind is TaskletKind.LOSS:
            self._run_loss(current)
        else:
            current.run(shape.kind)
        self._advance()
        return shape

    def _run_loss(self, current: TrainingPass | CapturedPass) -> None:
        objective, weight = self._objective, self.total_weight / self.gradient_scale
        if isinstance(current, TrainingPass):
            self._current_sums = current.loss(objective, weight)
        else:
            micro_batch = current.micro_batch
            if self._cursor.within == 0:
                current.begin_loss(objective.scales(micro_batch, weight))
            current.loss_part(self._cursor.within)
            if self._cursor.ends_run:
                self._current_sums = objective.finish(micro_batch, weight, *current.losses(), current.gradient)
        self._prepare_next()

    def begin_forward(self) -> tuple[MicroBatch, torch.Tensor]:
        """For a forward tasklet that someone else computes: its micro-batch and the layer's input [tokens, hidden]."""
        assert self.next_forward_layer is not None, "the next tasklet is not a forward one"
        current = self._current_pass()
        assert isinstance(current, TrainingPass)
        return current.micro_batch, current.begin_forward()

    def end_forward(self, output: torch.Tensor, tape: LayerTape) -> TaskletShape:
        """The output [tokens, hidden] of the tasklet that ``begin_forward`` began, and the tape that it filled."""
        shape, current = self._cursor.shape, self._current_pass()
        assert isinstance(current, TrainingPass)
        current.end_forward(output, tape)
        self._advance()
        return shape

    def discard(self) -> None:
        """Drop the activations and gradients of the micro-batch in flight, which starts again."""
        self._pass = self._prepared = None
        self._cursor.seek(self._first_runs[self._num_done])

    def limit(self, max_tasklet_tokens: int, *, num_recomputed: int) -> None:
        """Split what is not done yet into micro-batches of at most so many tokens, of whose layers ``num_recomputed``
        keep their inputs alone. The one in flight starts again if it is to be cut or keeps more, even where there would
        be room for it."""
        num_kept, divide = self._num_done, self._objective.split
        in_flight = None if self._pass is None else self._micro_batches[num_kept]
        if (
            in_flight is not None
            and num_recomputed <= self._recomputed[num_kept]
            and fits(in_flight, self._dataset, max_tasklet_tokens, divide)
        ):
            num_kept += 1
        else:
            self.discard()
        self._num_recomputed = num_recomputed
        kept, rest = self._micro_batches[:num_kept], self._micro_batches[num_kept:]
        if not rest:
            return
        examples = [example for shape in rest for example in shape.examples]
        self._prepared = None
        run, within = self._cursor.run, self._cursor.within
        self._set((*kept, *divide(self._dataset, examples, max_tasklet_tokens)), self._recomputed[:num_kept])
        self._cursor.seek(run, within)

    def _set(self, micro_batches: Sequence[MicroBatchShape], recomputed: Sequence[int] = ()) -> None:
        """``recomputed``: layers of the first of them, which are done or in flight; of the others as many as now."""
        self._micro_batches = tuple(micro_batches)
        self._recomputed = (*recomputed, *[self._num_recomputed] * (len(micro_batches) - len(recomputed)))
        each = [self._cycles(*pair) for pair in zip(self._micro_batches, self._recomputed, strict=True)]
        # Of each micro-batch, its first run's number among all; then that of all runs.
        self._first_runs = (0, *accumulate(sum(1 for _ in runs_of(cycles)) for cycles in each))
        self._cursor = Cursor(tuple(cycle for cycles in each for cycle in cycles))

    @property
    def _num_done(self) -> int:
        """Micro-batches done: the index of the one in flight."""
        return bisect_right(self._first_runs, self._cursor.run) - 1

    def _current_pass(self) -> TrainingPass | CapturedPass:
        if self._pass is None:
            micro_batch = self._prepared or self._build(self._num_done)
            num_recomputed, keys = self._recomputed[self._num_done], self._dropout_keys(micro_batch)
            self._prepared = None
            if self._activations is not None:
                self._pass = self._activations.begin(micro_batch, PassKind(num_recomputed), keys)
            else:
                self._pass = TrainingPass(self._decoder, micro_batch, num_recomputed=num_recomputed)
                # Holds until the next micro-batch: an evaluation, which turns dropout off, never runs within a step.
                self._adapter.dropout_masks = None if keys is None else DropoutMasks(keys, self._adapter.dropout)
        return self._pass

    def _build(self, index: int) -> MicroBatch:
        return build(self._dataset, self._micro_batches[index], self._adapter, self._decoder.device)

    def _dropout_keys(self, micro_batch: MicroBatch) -> torch.Tensor | None:
        """Of its tokens; the same for an example in whatever micro-batch of the step it is, whenever and however often
        that runs. None without dropout."""
        if self._adapter.dropout == 0.0:
            return None
        names = [f"dropout/{self._seed}/{self._step_index}/{example}" for example in micro_batch.examples]
        return upload(token_keys(names, micro_batch.segment.lengths), self._decoder.device)

    def _prepare_next(self) -> None:
        """Put the next micro-batch's tensors on the device while that has other things to do."""
        index = self._num_done + 1
        if self._activations is not None and self._prepared is None and index < len(self._micro_batches):
            self._prepared = self._build(index)

    def _advance(self) -> None:
        cursor = self._cursor
        cursor.advance()
        if cursor.within == 0 and cursor.run in self._first_runs:
            assert self._pass is not None
            with done_once():
                self._pass.commit()
                self._sums += self._current_sums
            self._pass = None

    def _cycles(self, shape: MicroBatchShape, num_recomputed: int) -> tuple[TaskletCycle, ...]:
        num_layers = self._decoder.spec.num_layers

        def run(kind: TaskletKind, count: int = 1) -> TaskletRun:
            return TaskletRun(TaskletShape(kind, shape.num_tokens, shape.max_length), count)

        num_kept = num_layers - num_recomputed
        if self._activations is None:
            loss = loss_run(TaskletKind.LOSS, shape)
            forward = TaskletCycle((run(TaskletKind.FORWARD, num_layers),))
            backward = TaskletCycle((run(TaskletKind.BACKWARD, num_kept),), min(1, num_kept))
            again = TaskletCycle((run(TaskletKind.RECOMPUTE), run(TaskletKind.BACKWARD)), num_recomputed)
        else:
            loss = captured_loss_run(TaskletKind.LOSS, shape)
            forward = TaskletCycle(tuple(map(run, FORWARD_PARTS)), num_layers)
            backward = TaskletCycle(tuple(map(run, BACKWARD_PARTS)), num_kept)
            again = TaskletCycle(tuple(map(run, (*RECOMPUTE_PARTS, *BACKWARD_PARTS))), num_recomputed)
        return tuple(cycle for cycle in (forward, TaskletCycle((loss,)), backward, again) if cycle.count)


def _gradient_scale(dtype: torch.dtype, total_weight: float) -> float:
    """1, but in float16 a power of 2 near the step's weight: gradients per token would vanish in it otherwise."""
    return 2.0 ** math.floor(math.log2(total_weight)) if dtype == torch.float16 and total_weight > 0 else 1.0
