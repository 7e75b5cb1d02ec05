"""A fine-tuning job in the worker: training that can be suspended, discarded, stopped, killed and taken up again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from cotenant.core.job import JobSpec, StepMetrics
from cotenant.core.tasklet import TaskletCycle, TaskletShape
from cotenant.device import Device
from cotenant.finetune.checkpoint import TrainerState
from cotenant.finetune.divergence import TrainingError
from cotenant.finetune.job_files import JobFiles
from cotenant.finetune.job_training import Training, make_training
from cotenant.finetune.order import DataOrder
from cotenant.finetune.preparation import Prepared, as_job_error, prepare
from cotenant.finetune.selection import best_of
from cotenant.finetune.state import TrainingState
from cotenant.finetune.trainer import FusedInput, Trainer
from cotenant.finetune.writer import WriteError
from cotenant.models.decoder import Decoder
from cotenant.models.lora import LoraAdapter
from cotenant.models.tape import LayerTape
from cotenant.wire.messages import (
    CheckpointSaved,
    FromWorker,
    JobFailed,
    JobMetrics,
    JobStarted,
    JobSucceeded,
    JobWarning,
)

__all__ = ["FusedInput", "TrainingJob"]

logger = logging.getLogger(__name__)

# The time left is said again after so long at most: while a step waits for requests, or an evaluation is long.
_ESTIMATE_EVERY_S = 5.0


class TrainingJob:
    """One job as a state machine that runs one tasklet at a time; suspending it is not calling it.

    Takes up ``spec.folder``'s newest whole checkpoint, or starts from the beginning. If the folder already holds the
    finished adapter, ``finished_path`` is set and there is nothing to run.

    Files are written in the background, so ``upcoming()`` may be empty while the job is not ``done`` yet: keep calling
    ``take_updates()``. A step that may end with a checkpoint is not begun while two wait for the disk: each is a copy
    of the training state. ``done`` turns true when a ``JobSucceeded`` or ``JobFailed`` has been handed out.
    """

    def __init__(
        self,
        decoder: Decoder,
        spec: JobSpec,
        max_tasklet_tokens: int,
        tokenizer_folder: Path | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        free_bytes: int | None = None,
        device: Device | None = None,
        limit_is_fixed: bool = True,
        prepared: Prepared | None = None,
    ) -> None:
        """
        ``max_tasklet_tokens``: tokens of a micro-batch at most (a longer example still is one).
        ``limit_is_fixed``: the user chose that number; if not, a smaller one is taken that suits the device better.
        ``clock``: seconds on a monotonic clock, for the estimate of the time left.
        ``free_bytes``: memory of the device that the job may take; None: enough.
        ``device``: the decoder's, whose graphs the job may make use of, and whose multiprocessors its micro-batches
        are made to fit; None: its layers run eagerly.
        ``prepared``: what ``prepare`` gave for the same job; None: that is done here, and the job's folder made.

        Raises:
            InvalidInputError: the data or the settings cannot be used.
            CotenantError: the job's folder cannot be read or written, or belongs to a different job.
        """
        self._spec = spec
        self._clock = clock
        self._estimated_s = clock()  # when the time left was reported, the last time
        self._files = JobFiles(spec, tokenizer_folder)
        self._recorded: list[StepMetrics] = []  # the steps before this object
        self._new_steps: list[StepMetrics] = []
        self._last: StepMetrics | None = None  # the last step that is over, its evaluation included
        self._failure: JobFailed | None = None
        self._saved: tuple[int, bool] | None = None  # step of the newest checkpoint, and whether it awaits evaluation
        is_finished = prepared is None and self._files.finished
        self.finished_path: str | None = str(self._files.adapter_path) if is_finished else None
        self.done = self.finished_path is not None
        self._training: Training | None = None
        self._is_stopped = False
        self._resumed_step = 0
        self._warnings: tuple[str, ...] = ()
        self._announced: tuple[CheckpointSaved, ...] = ()  # of earlier checkpoints
        try:
            if prepared is None:
                Path(spec.folder).mkdir(parents=True, exist_ok=True)
                prepared = prepare(spec, decoder.spec, max_tasklet_tokens)
            if prepared is None:
                self._recorded = self._files.steps()
                self._resumed_step = len(self._recorded)
            else:
                self._warnings, self._recorded = prepared.warnings, list(prepared.recorded)
                self._announced = prepared.announced
                self._training = make_training(
                    decoder,
                    spec,
                    prepared,
                    max_tasklet_tokens,
                    resume=self._resume,
                    on_step=self._on_step,
                    clock=clock,
                    free_bytes=free_bytes,
                    device=device,
                    limit_is_fixed=limit_is_fixed,
                )
                self._resumed_step = self._training.state.step
            self._selection = best_of(self._recorded, spec.hyperparameters)
            if self._training is not None:
                self._begin(self._training)
        except OSError as error:
            self.close()
            raise as_job_error(error) from error
        except BaseException:
            self.close()
            raise

    # What the job is and where it stands

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self._training.state.step if self._training else len(self._recorded)

    @property
    def total_steps(self) -> int:
        """Steps of the whole job, as far as it is known that it will not stop early."""
        return self.step if self._training is None or self._selection.stops else self._training.order.total_steps

    @property
    def trained_tokens(self) -> int:
        """Tokens of all steps taken so far."""
        return self._training.state.trained_tokens if self._training else sum(step.tokens for step in self._recorded)

    @property
    def order(self) -> DataOrder:
        """Which examples make up which step."""
        return self._running.order

    @property
    def adapter(self) -> LoraAdapter:
        """The adapter in training; the optimizer changes it in place."""
        return self._running.state.adapter

    @property
    def in_flight(self) -> bool:
        """Whether a discard would free activations."""
        return self._training is not None and self._training.trainer.in_flight

    def start_updates(self) -> list[FromWorker]:
        """What to report once, before the first tasklet: where the job stands, and all that happened before. Reads
        files only if the job is finished. Raises OSError if they cannot be read."""
        updates: list[FromWorker] = [
            JobStarted(self._spec.job_id, self.total_steps, self._resumed_step, self._mean_step_tokens())
        ]
        if self._resumed_step == 0:
            updates += [JobWarning(self._spec.job_id, warning) for warning in self._warnings]
        unknown = tuple(step for step in self._recorded if step.step > self._spec.recorded_step)
        if unknown:
            updates.append(JobMetrics(self._spec.job_id, unknown, self.trained_tokens, None))
        if self.finished_path is None:
            return [*updates, *self._announced]
        updates += self._files.announced(self._resumed_step)
        return [*updates, self._files.succeeded(self.total_steps, self.trained_tokens)]

    # Running

    def upcoming(self) -> tuple[TaskletCycle, ...]:
        """The tasklets up to the end of the current step, optimizer and evaluation included. Does no tensor work."""
        trainer = self._active
        return trainer.upcoming() if trainer is not None else ()

    @property
    def runnable(self) -> bool:
        """Whether anything is ``upcoming``."""
        return self.next_shape is not None

    @property
    def next_waits(self) -> bool:
        """Whether the next tasklet waits for the device while it is launched."""
        trainer = self._active
        return trainer is not None and trainer.next_waits

    @property
    def next_shape(self) -> TaskletShape | None:
        """The first of what is ``upcoming``."""
        trainer = self._active
        return trainer.next_shape if trainer is not None else None

    @property
    def waits_for_copy(self) -> bool:
        """Whether the next tasklet would change what is being copied, and is not ``upcoming`` for a moment."""
        return self._training is not None and self._training.trainer.optimizer_is_next and self._files.is_copied

    def run_tasklet(self) -> TaskletShape:
        """Run the next tasklet of ``upcoming()``. A loss that is not finite ends the job with ``JobFailed``."""
        shape = self._running.trainer.next_shape
        assert shape is not None, "there is nothing to run"
        try:
            self._running.trainer.run_tasklet()
        except TrainingError as error:
            bad_step = self.step if error.is_lost else None
            advice = "try a lower learning_rate or lora_alpha"
            self._fail("training_diverged", f"{error} {self._kept(bad_step)}; {advice}.", bad_step)
        return shape

    @property
    def fusable_layer(self) -> int | None:
        """The layer of the next tasklet, if it is a training forward and can run inside another batch."""
        trainer = self._active
        return trainer.fusable_layer if trainer is not None else None

    def begin_fused(self) -> FusedInput:
        """Hand the next forward tasklet out to be computed inside another batch, outside inference mode."""
        return self._running.trainer.begin_fused()

    def end_fused(self, output: torch.Tensor, tape: LayerTape) -> TaskletShape:
        """Take the layer's output for the training tokens [tokens, hidden], and the tape of their rows."""
        return self._running.trainer.end_fused(output, tape)

    def discard_step(self) -> None:
        """Drop activations and gradients of the micro-batch in flight; its samples run again, exactly once. What the
        step's micro-batches before it learned is kept, in the adapter's gradients."""
        if self._training is not None:
            self._training.trainer.discard()

    @property
    def mapped_bytes(self) -> int:
        """Memory under the arena of activations, in use or not."""
        return self._training.trainer.mapped_bytes if self._training is not None else 0

    def discard_all(self) -> None:
        """``discard_step``, and give all memory of activations back to the device until the next micro-batch."""
        if self._training is not None:
            self._training.trainer.discard_all()

    def require(self, num_bytes: int) -> int:
        """Give memory of activations away, and return how much; see ``Trainer.require``. ``release`` takes it back."""
        return self._running.trainer.require(num_bytes)

    def release(self, num_bytes: int) -> None:
        self._running.trainer.release(num_bytes)

    @property
    def max_tokens(self) -> int:
        """Tokens of a micro-batch at most, with the memory that there is now; 0: there is room for none."""
        return self._running.trainer.max_tokens

    @property
    def num_recomputed(self) -> int:
        """Layers of the next micro-batches that keep their inputs alone."""
        return self._running.trainer.num_recomputed

    @property
    def left_bytes(self) -> int:
        """Memory of activations that was not given away. What the longest validation example takes never is."""
        return self._running.trainer.left_bytes

    # Reporting and stopping

    def take_updates(self) -> list[FromWorker]:
        """What happened since the last call, in order. A checkpoint or the end is reported once it is on disk."""
        updates: list[FromWorker] = [*self._measured()]
        try:
            updates.extend(self._files.take())
        except WriteError as error:
            logger.error("Job %s: %s", self._spec.job_id, error.message)
            self._fail(error.code, error.message)
        if any(isinstance(update, JobSucceeded) for update in updates):
            self.finished_path = str(self._files.adapter_path)
            self.done = True
        if self._failure is not None and self._files.idle and not self.done:
            updates.append(self._failure)
            self.done = True
        return updates

    def checkpoint(self) -> list[FromWorker]:
        """``begin_checkpoint``, and return once it is on disk.

        Returns the outstanding updates, which may include ``JobFailed`` if the disk is full, or ``JobSucceeded`` if the
        job was only writing its result.
        """
        self.begin_checkpoint()
        self.wait_for_writes()
        return self.take_updates()

    def begin_checkpoint(self) -> None:
        """Discard the micro-batch in flight and begin to write a checkpoint of the last optimizer step.

        Whoever takes the job up from it runs what follows, the next step or the evaluation due, from its beginning.
        For a pause, a cancellation or the end of the worker. Run no tasklet after it; it is over when ``writing`` is
        False and the updates have been taken.
        """
        self.discard_step()
        if self._training is not None and self._failure is None:
            pending = self._training.trainer.pending
            metrics = self._last if pending is None else pending
            if metrics is not None and self._saved != (metrics.step, pending is not None):
                self._save(metrics, announced=False, needs_evaluation=pending is not None)

    @property
    def writing(self) -> bool:
        """Whether files are being written, or what that gave was not taken yet."""
        return not self._files.idle

    def wait_for_writes(self) -> None:
        """Block until everything that is being written is on disk (or has failed)."""
        self._files.wait()

    def stop_training(self) -> None:
        """Let go of the step in flight and of all activations' memory, once the device is done with it. Run no tasklet
        after it; what is being written goes on."""
        if self._training is not None and not self._is_stopped:
            self._is_stopped = True
            self._training.trainer.close()

    def close(self) -> None:
        """``stop_training``, and end the writing thread, after what it was given."""
        self.stop_training()
        self._files.close()

    # Inside

    @property
    def _running(self) -> Training:
        assert self._training is not None, "the job is finished"
        return self._training

    @property
    def _active(self) -> Trainer | None:
        """None once the job has failed, while its next step waits for the disk, and while its optimizer waits for a
        copy of what it would change."""
        training = self._training
        if training is None or self._failure is not None:
            return None
        if self.waits_for_copy:
            return None
        if self._files.is_behind and training.order.may_save(training.state.step + (training.trainer.pending is None)):
            return None
        return training.trainer

    def _measured(self) -> Iterator[JobMetrics]:
        """The new steps; without any, now and then what is known of the time left."""
        training, now_s = self._training, self._clock()
        is_due = not self._is_stopped and self._failure is None and now_s - self._estimated_s >= _ESTIMATE_EVERY_S
        if training is None or not (self._new_steps or is_due):
            return
        remaining_s = training.progress.remaining_s(training.trainer.work_left())
        if self._new_steps or remaining_s is not None:
            yield JobMetrics(self._spec.job_id, tuple(self._new_steps), self.trained_tokens, remaining_s)
        self._new_steps.clear()
        self._estimated_s = now_s

    def _mean_step_tokens(self) -> float:
        return self._training.order.mean_step_tokens if self._training else self.trained_tokens / max(1, self.step)

    def _resume(
        self, state: TrainingState, newest: tuple[TrainerState, dict[str, torch.Tensor]] | None
    ) -> StepMetrics | None:
        """Take up the newest checkpoint, if any. Returns the metrics of a step that still awaits its evaluation."""
        if newest is None:
            return None
        checkpoint, tensors = newest
        state.restore(checkpoint, tensors)
        logger.info("Job %s goes on from its checkpoint at step %d", self._spec.job_id, checkpoint.step)
        self._last = None if checkpoint.needs_evaluation else checkpoint.metrics
        self._saved = (checkpoint.step, checkpoint.needs_evaluation)
        return checkpoint.metrics if checkpoint.needs_evaluation else None

    def _begin(self, training: Training) -> None:
        training.state.before_step = self._files.wait_until_copied
        only_export_left = training.trainer.pending is None and training.state.step == self.total_steps
        if self._selection.stops:
            training.trainer.stop()
        training.trainer.start()
        if only_export_left:
            self._finish()

    def _on_step(self, metrics: StepMetrics) -> None:
        training, hyper = self._running, self._spec.hyperparameters
        self._last = metrics
        self._new_steps.append(metrics)
        self._files.write_metrics(metrics)
        is_best = self._selection.add(metrics) and hyper.load_best_model_at_end
        is_last = metrics.step == self.total_steps
        is_due = training.order.saves(metrics.step)
        if is_due or is_best or is_last:
            self._save(metrics, announced=is_due or is_last, needs_evaluation=False)
        if is_last:
            training.trainer.stop()
            self._finish()

    def _kept(self, bad_step: int | None) -> str:
        if self._saved is None:
            return "There is no checkpoint to fall back on"
        saved_step = self._saved[0]
        if saved_step == bad_step:
            return "Checkpoints from before that are kept, if any were saved"
        return f"The checkpoint of step {saved_step} is kept"

    def _save(self, metrics: StepMetrics, *, announced: bool, needs_evaluation: bool) -> None:
        state = self._running.state
        trainer_state = state.trainer_state(metrics, announced=announced, needs_evaluation=needs_evaluation)
        self._saved = (metrics.step, needs_evaluation)
        self._files.write_checkpoint(trainer_state, state.begin_copy(), self._selection.result_step)

    def _finish(self) -> None:
        last = self._running.state.begin_copy()
        self._files.write_result(last, self._selection.result_step, self.total_steps, self.trained_tokens)

    def _fail(self, code: str, message: str, bad_step: int | None = None) -> None:
        self.discard_step()
        if self._failure is None:
            self._failure = JobFailed(self._spec.job_id, code, message, self.step, bad_step)
