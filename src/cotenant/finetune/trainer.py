"""Training as a sequence of tasklets: micro-batches, optimizer step, the evaluation that follows it, the next step.

Knows nothing of files and messages; ``job`` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from cotenant.core.job import Hyperparameters, StepMetrics
from cotenant.core.tasklet import TaskletCycle, TaskletKind, TaskletRun, TaskletShape
from cotenant.finetune.activations import Activations
from cotenant.finetune.agenda import Agenda
from cotenant.finetune.budget import ladder
from cotenant.finetune.dataset import Dataset
from cotenant.finetune.divergence import check_measured, check_trained
from cotenant.finetune.evaluation import ValidationSet
from cotenant.finetune.job_setup import make_budget
from cotenant.finetune.order import DataOrder
from cotenant.finetune.preference_evaluation import PreferenceValidationSet
from cotenant.finetune.preference_step import PreferenceStep
from cotenant.finetune.progress import Progress, Work
from cotenant.finetune.schedule import learning_rate
from cotenant.finetune.state import TrainingState
from cotenant.finetune.step import TrainingStep
from cotenant.finetune.tasklets import done_once
from cotenant.finetune.waves import wave_efficiency
from cotenant.models.batch import TrainingSegment
from cotenant.models.decoder import Decoder
from cotenant.models.lora import LoraAdapter
from cotenant.models.tape import LayerTape

# The tasklets of a step that an evaluation has as well.
_FORWARD_KINDS = (
    TaskletKind.FORWARD,
    TaskletKind.FORWARD_ATTENTION,
    TaskletKind.FORWARD_MLP,
    TaskletKind.LOSS,
    TaskletKind.EVAL_FORWARD,
    TaskletKind.EVAL_LOSS,
)
_OPTIMIZER = TaskletShape(TaskletKind.OPTIMIZER, 0)
_OPTIMIZER_CYCLE = TaskletCycle((TaskletRun(_OPTIMIZER, 1),))


@dataclass(frozen=True, slots=True)
class FusedInput:
    """A forward tasklet for someone else to compute: layer ``layer`` over a batch that has these tokens among others.

    ``hidden`` [tokens, hidden] is the layer's input; ``segment``, ``adapter`` and ``positions`` [tokens] are what the
    training tokens bring into the batch besides. ``end_fused`` wants a tape of their rows too.
    """

    layer: int
    hidden: torch.Tensor
    segment: TrainingSegment
    adapter: LoraAdapter
    positions: torch.Tensor


class Trainer:
    """Runs one tasklet at a time. ``on_step`` is called with each step's metrics once its evaluation is over.

    ``pending``: metrics of a step that was taken before, whose evaluation is still to run. ``free_bytes``: of the
    device's memory, what the job may take, of which its adapter takes ``taken_bytes``; None: enough. ``activations``:
    where layers are captured; the trainer closes it. ``num_multiprocessors``: those that training runs on, where
    micro-batches should fit them; without ``limit_is_fixed`` the largest may then be smaller than
    ``max_tasklet_tokens``.
    """

    def __init__(
        self,
        decoder: Decoder,
        state: TrainingState,
        dataset: Dataset,
        order: DataOrder,
        validation: ValidationSet | PreferenceValidationSet | None,
        hyper: Hyperparameters,
        *,
        max_tasklet_tokens: int,
        pending: StepMetrics | None,
        progress: Progress,
        on_step: Callable[[StepMetrics], None],
        free_bytes: int | None = None,
        taken_bytes: int = 0,
        activations: Activations | None = None,
        num_multiprocessors: int | None = None,
        limit_is_fixed: bool = True,
    ) -> None:
        self._state = state
        self._order = order
        self._hyper = hyper
        self._activations = activations
        self._agenda = Agenda(decoder, state.adapter, dataset, order, validation, hyper, activations)
        efficiency = None
        if num_multiprocessors is not None:
            efficiency = partial(wave_efficiency, decoder.spec, num_multiprocessors=num_multiprocessors)
        self._max_tasklet_tokens = max_tasklet_tokens
        sizes = ladder(max_tasklet_tokens, order.longest, efficiency, most_is_fixed=limit_is_fixed)
        self._budget = make_budget(
            decoder,
            activations,
            sizes,
            validation.longest if validation is not None else 0,
            free_bytes,
            taken_bytes,
            efficiency,
            recompute_all=hyper.gradient_checkpointing,
        )
        self._on_step = on_step
        self._pending = pending
        self._progress = progress
        self._step: TrainingStep | PreferenceStep | None = None
        self._evaluation = None if pending is None else self._agenda.evaluation_after(state.step, self.max_tokens)
        self._fusing = False
        self._upcoming: tuple[TaskletCycle, ...] | None = None
        self._stopped = False

    def start(self) -> None:
        """Get ready for the first tasklet."""
        if self._pending is None:
            self._begin_step()
        elif self._evaluation is None:  # the validation file is gone since
            self._finish_step(self._pending)

    def stop(self) -> None:
        """Begin no further step."""
        self._stopped = True

    @property
    def pending(self) -> StepMetrics | None:
        """The metrics, so far, of a step whose optimizer has run and whose evaluation has not."""
        return self._pending

    def work_left(self) -> Work:
        """What is still to be computed, the evaluation that is due included, if the job does not stop early. Counted in
        whole micro-batches."""
        order, step = self._order, self._state.step
        trained = order.total_steps * order.mean_step_tokens - self._state.trained_tokens
        evaluated = self._agenda.evaluated_tokens_after(step)
        if self._step is not None:
            trained -= self._step.num_tokens_done
        elif self._evaluation is not None:
            evaluated += self._evaluation.num_tokens_left
        return Work(max(0.0, trained), evaluated)

    @property
    def max_tokens(self) -> int:
        """Tokens of a micro-batch at most, with the memory that there is now; 0: there is room for none. What cannot be
        cut, a longer example or pair, has room as well where there is any."""
        return min(self._budget.max_tokens, self._max_tasklet_tokens)

    @property
    def num_recomputed(self) -> int:
        """Layers of the next micro-batches that keep their inputs alone."""
        return self._budget.num_recomputed

    @property
    def left_bytes(self) -> int:
        """Memory of activations that was not given away."""
        return self._budget.left_bytes

    @property
    def in_flight(self) -> bool:
        """Whether there are activations or gradients that a discard would free."""
        step_started = self._step is not None and self._step.started
        return step_started or (self._evaluation is not None and self._evaluation.started)

    def upcoming(self) -> tuple[TaskletCycle, ...]:
        """The tasklets up to the end of the current step, its evaluation included; empty when all steps are taken, and
        while memory is short of the smallest micro-batch."""
        if self._budget.max_tokens == 0:
            return ()
        if self._upcoming is None:
            evaluation = self._evaluation.upcoming if self._evaluation is not None else ()
            if self._step is not None:
                self._upcoming = (*self._step.upcoming, _OPTIMIZER_CYCLE, *evaluation)
            else:
                self._upcoming = evaluation
        return self._upcoming

    @property
    def next_shape(self) -> TaskletShape | None:
        """The first of ``upcoming``, if there is one. Asked before each tasklet, where ``upcoming`` would be long."""
        if self._budget.max_tokens == 0:
            return None
        if self._step is not None:
            return _OPTIMIZER if self._step.done else self._step.next_shape
        return None if self._evaluation is None else self._evaluation.next_shape

    @property
    def optimizer_is_next(self) -> bool:
        return self._step is not None and self._step.done

    @property
    def next_waits(self) -> bool:
        """Whether the launch of the next tasklet waits for the device: the optimizer's reads the gradient's norm, an
        evaluation's last one its figures."""
        if self._step is not None:
            return self._step.done
        return self._evaluation is not None and self._evaluation.is_last

    def run_tasklet(self) -> TaskletShape:
        """Run the next tasklet.

        Raises:
            TrainingError: the loss or the gradient is not finite, and the optimizer has not run; or the loss that is
                measured after a step is not.
        """
        assert not self._fusing, "end_fused or a discard comes first"
        self._upcoming = None
        if self._step is not None:
            if not self._step.done:
                shape = self._step.run_tasklet()
                self._progress.tasklet_done(forward=shape.kind in _FORWARD_KINDS)
                return shape
            self._run_optimizer(self._step)
            return _OPTIMIZER
        assert self._evaluation is not None, "there is nothing left to run"
        assert self._pending is not None
        shape = self._evaluation.run_tasklet()
        if self._evaluation.done:
            self._progress.evaluated(self._evaluation.num_tokens)
            with done_once():
                metrics = self._evaluation.add_to(self._pending)
            check_measured(metrics)
            with done_once():
                self._finish_step(metrics)
        return shape

    @property
    def fusable_layer(self) -> int | None:
        """The layer of the next tasklet if it is a training forward, and there is memory for it."""
        if self._step is None or self._fusing or self._budget.max_tokens == 0:
            return None
        return self._step.next_forward_layer

    def begin_fused(self) -> FusedInput:
        """Hand the next forward tasklet out; ``end_fused`` takes its output, or a discard calls it off."""
        layer = self.fusable_layer
        assert layer is not None, "the next tasklet is not a forward one"
        assert self._step is not None
        micro_batch, hidden = self._step.begin_forward()
        self._fusing = True
        return FusedInput(layer, hidden, micro_batch.segment, self._state.adapter, micro_batch.batch.positions)

    def end_fused(self, output: torch.Tensor, tape: LayerTape) -> TaskletShape:
        """``output``: the layer's output for the training tokens [tokens, hidden]; ``tape``: filled with their rows."""
        assert self._fusing, "begin_fused comes first"
        assert self._step is not None
        self._fusing = False
        self._upcoming = None
        shape = self._step.end_forward(output, tape)
        self._progress.tasklet_done(forward=True)
        return shape

    def discard(self) -> None:
        """Drop what the micro-batch in flight has computed, of the step or of the evaluation; it runs again. No
        training state changes."""
        self._fusing = False
        self._upcoming = None
        if self._step is not None:
            self._step.discard()
        if self._evaluation is not None:
            self._evaluation.discard()

    @property
    def mapped_bytes(self) -> int:
        """Memory under the arena of activations; 0 where there is none."""
        return 0 if self._activations is None else self._activations.mapped_bytes

    def discard_all(self) -> None:
        """``discard``, and give all memory of activations back. The next micro-batch takes what it needs again."""
        self.discard()
        if self._activations is not None:
            self._activations.drop()

    def require(self, num_bytes: int) -> int:
        """Give memory of activations away, and return how much: all of ``num_bytes`` if training has so much to give.

        Micro-batches become so small that they fit what is left. One in flight that is larger is dropped; finished ones
        are kept, and every sample is trained on once. Some or all of the layers keep their inputs alone and are
        computed again, where the smaller micro-batches that would have room without that are slower, or there are none;
        where even the longest example has no room so, nothing is ``upcoming`` until enough is released. That goes for
        validation and DPO's reference as well; what validation's longest example takes is not given away.
        """
        given = self._budget.require(num_bytes)
        if self._fusing or self._budget.max_tokens == 0:
            self.discard()
        self._limit()
        if self._activations is not None:
            self._activations.give_back(self._budget.left_bytes)
        return given

    def release(self, num_bytes: int) -> None:
        """Take memory back that ``require`` gave away. Micro-batches grow with the next step, or at once where there
        was no room for any."""
        had_room = self._budget.max_tokens > 0
        self._budget.release(num_bytes)
        self._upcoming = None
        if not had_room:
            self._limit()

    def close(self) -> None:
        """Let go of the micro-batch in flight and of whom ``on_step`` belongs to: else the two would keep each other
        alive, and the memory would wait for the garbage collector."""
        self.discard()
        if self._activations is not None:
            self._activations.close()
        self._on_step = _ignore

    def _limit(self) -> None:
        """Cut what is not done yet to the memory that there is now, if that has room for anything."""
        self._upcoming = None
        limit = self.max_tokens
        if self._step is not None and limit > 0:
            self._step.limit(limit, num_recomputed=self._budget.num_recomputed)
        if self._evaluation is not None and limit > 0:
            self._evaluation.limit(limit)

    def _begin_step(self) -> None:
        self._upcoming = None
        index = self._state.step
        if self._stopped or index >= self._order.total_steps:
            return
        self._step = self._agenda.step(index, self.max_tokens, self._budget.num_recomputed)
        self._evaluation = self._agenda.evaluation_after(index + 1, self.max_tokens)

    def _run_optimizer(self, step: TrainingStep | PreferenceStep) -> None:
        state = self._state
        number = state.step + 1
        figures = step.figures(state.optimizer.clip(step.gradient_scale))
        loss, grad_norm = figures.loss, figures.grad_norm
        check_trained(number, loss, grad_norm)
        preference = step.preference() if isinstance(step, PreferenceStep) else None
        rate = learning_rate(self._hyper, state.step, self._order.total_steps)
        state.before_step()
        state.optimizer.step(rate)  # nothing waits for it: the next step is made meanwhile
        if self._activations is not None:
            self._activations.refresh()
        state.step = number
        state.trained_tokens += step.num_tokens
        self._progress.trained(step.num_tokens, step.num_forward_tokens)
        self._step = None
        metrics = StepMetrics(
            step=number,
            epoch=number / self._order.steps_per_epoch,
            train_loss=loss,
            train_mean_token_accuracy=figures.accuracy,
            learning_rate=rate,
            grad_norm=grad_norm,
            tokens=step.num_tokens,
            preference=preference,
        )
        if self._evaluation is None:
            self._finish_step(metrics)
        else:
            self._pending = metrics

    def _finish_step(self, metrics: StepMetrics) -> None:
        self._pending = None
        self._evaluation = None
        self._on_step(metrics)
        self._begin_step()


def _ignore(metrics: StepMetrics) -> None:
    """Nobody listens any more."""
