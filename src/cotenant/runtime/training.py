"""The best-effort tenant in the worker: at most one fine-tuning job, whatever goes wrong in it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from cotenant.core.errors import CotenantError
from cotenant.core.job import JobSpec
from cotenant.core.plan import JobView
from cotenant.core.tasklet import TaskletKind, TaskletShape
from cotenant.device import Device
from cotenant.finetune.job import FusedInput, TrainingJob
from cotenant.finetune.preparation import Prepared, as_job_error, lay_out, prepare
from cotenant.models.decoder import Decoder
from cotenant.models.tape import LayerTape
from cotenant.runtime.shortage import is_out_of_memory
from cotenant.wire.messages import FromWorker, JobCancelled, JobFailed, JobPaused

logger = logging.getLogger(__name__)

# When serving runs out of memory: the share of its activations that a job goes without from then on, and how long.
_SHORTAGE_SHARE = 4
_SHORTAGE_S = 60.0
_TIDY_S = 1e-3  # of an iteration, for what ended jobs have left behind
_MOST_SHORTAGES = 8  # that a job's own tasklets may run into, one after the other, before it fails
_Ran = TypeVar("_Ran")
NOTHING = TaskletShape(TaskletKind.FORWARD, 0)  # of a tasklet that came to nothing


class _Preparation(NamedTuple):
    """What a job that is to start needs from its files, being read."""

    spec: JobSpec
    result: Future[Prepared | None]  # None: the job is finished, and needs nothing
    is_forgotten: threading.Event


class TrainingTenant:
    """Starts, suspends and ends jobs. An error in a job ends that job, never the worker."""

    def __init__(
        self,
        device: Device,
        decoder: Decoder,
        tokenizer_folder: Path | None,
        max_tasklet_tokens: int,
        send: Callable[[FromWorker], None],
        *,
        limit_is_fixed: bool = True,
        batch_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``limit_is_fixed``: the user chose ``max_tasklet_tokens``; if not, a job may take a smaller number that suits
        the device better. ``batch_bytes``: of the device's free memory, what batches need while they run."""
        self._is_ready: Callable[[], bool] = lambda: True
        self._reserved_bytes: Callable[[], int] = lambda: 0
        self._device = device
        self._decoder = decoder
        self._tokenizer_folder = tokenizer_folder
        self._max_tasklet_tokens = max_tasklet_tokens
        self._limit_is_fixed = limit_is_fixed
        self._batch_bytes = batch_bytes
        self._clock = clock
        self._send = send
        self._preparer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="job-preparer")
        self._preparation: _Preparation | None = None  # of the next job; then there is no other
        self._job: TrainingJob | None = None
        self._job_id = ""
        self._tokens_before = 0
        self._tokens_at_start = 0
        self._ending: type[JobPaused] | type[JobCancelled] | JobFailed | None = None
        self._answer: type[JobPaused] | type[JobCancelled] | None = None  # to who stops a job that has failed
        self._withheld_bytes = 0  # from the job, since memory was short
        self._withheld_until_s = 0.0
        self.at_step_end = False
        self._num_shortages = 0

    def wait_for(self, is_ready: Callable[[], bool], reserved_bytes: Callable[[], int] = lambda: 0) -> None:
        """Run no tasklet before ``is_ready`` says yes. ``reserved_bytes``: of the device's free memory, what others
        need until then."""
        self._is_ready = is_ready
        self._reserved_bytes = reserved_bytes

    @property
    def job_id(self) -> str | None:
        """Of the job that runs, stops or is being prepared."""
        if self._preparation is not None:
            return self._preparation.spec.job_id
        return self._job_id if self._job is not None else None

    @property
    def trained_tokens(self) -> int:
        """Tokens trained on by this worker, over all its jobs; it only grows."""
        return self._tokens_before + (self._job.trained_tokens - self._tokens_at_start if self._job else 0)

    @property
    def next_waits(self) -> bool:
        """Whether the next tasklet waits for the device while it is launched."""
        return self._job is not None and self._job.next_waits

    @property
    def runnable(self) -> bool:
        return self._job is not None and self._ending is None and self._is_ready() and self._job.runnable

    @property
    def fusable_layer(self) -> int | None:
        if self._job is None or self._ending is not None or not self._is_ready():
            return None
        return self._job.fusable_layer

    def view(self) -> JobView | None:
        """The running job for the snapshot; None when there is none or it waits for its files to be written."""
        if self._job is None or self._ending is not None or not self._is_ready():
            return None
        upcoming = self._job.upcoming()
        return JobView(self._job_id, upcoming) if upcoming else None

    def prepare(self, spec: JobSpec) -> None:
        """Begin to read what a job needs on a thread, and to lay it out, for ``start_prepared``."""
        if self._job is not None and self._ending is not None:
            self._wait_until_ended()
        if self.job_id is not None:
            if self.job_id != spec.job_id:
                self._send(JobFailed(spec.job_id, "worker_busy", f"the worker is running job {self.job_id}", 0))
            return
        is_forgotten = threading.Event()
        result = self._preparer.submit(self._prepare, spec, self.free_bytes(), is_forgotten)
        self._preparation = _Preparation(spec, result, is_forgotten)

    def _prepare(self, spec: JobSpec, free_bytes: int, is_forgotten: threading.Event) -> Prepared | None:
        """On the preparing thread."""
        prepared = prepare(spec, self._decoder.spec, self._max_tasklet_tokens)
        if prepared is None or is_forgotten.is_set():
            return None
        return lay_out(prepared, spec, self._decoder, free_bytes)

    def close(self) -> None:
        """Forget what is being prepared, and return once its thread has ended: it reads the job's folder. For a worker
        that has no job any more."""
        if self._preparation is not None:
            self._forget_preparation(self._preparation.spec.job_id)
        self._preparer.shutdown(cancel_futures=True)

    def tidy(self) -> None:
        """Let go of a little of what jobs that have ended left behind."""
        self._device.destroy_retired(_TIDY_S)

    @property
    def is_tidy(self) -> bool:
        """Whether there is nothing to ``tidy``."""
        return not self._device.has_retired

    def start_prepared(self) -> None:
        """Begin the job that ``prepare`` was called for, or go on with it from its newest checkpoint, if what it needs
        has been read, and memory has only what is in use."""
        if self._preparation is None or not self._preparation.result.done() or not self.is_tidy:
            return
        spec, result, _ = self._preparation
        self._preparation = None
        job = None
        try:
            prepared = result.result()
            del result  # it would keep what was laid out on the device
            with suppress(torch.OutOfMemoryError):
                job = self._make_job(spec, prepared)
            if job is None:  # memory that arenas have kept is free, but torch does not know of it
                prepared = None if prepared is None else prepared.on_cpu()
                self._device.release_kept_memory()
                job = self._make_job(spec, prepared)
            updates = job.start_updates()
        except Exception as error:
            if job is not None:
                job.close()
            logger.warning("job %s cannot start: %s", spec.job_id, error, exc_info=not isinstance(error, CotenantError))
            self._send(_failure(spec.job_id, 0, as_job_error(error) if isinstance(error, OSError) else error))
            return
        for update in updates:
            self._send(update)
        if job.done:
            job.close()
            return
        self._job, self._job_id = job, spec.job_id
        self._tokens_at_start = job.trained_tokens

    def start(self, spec: JobSpec) -> None:
        """``prepare`` and ``start_prepared``, and wait between them."""
        self.prepare(spec)
        if self._preparation is not None:
            wait([self._preparation.result])
        while not self.is_tidy:
            self.tidy()
        self.start_prepared()

    @property
    def waits_shortly(self) -> bool:
        """Whether a job cannot go on, but most likely can in a moment."""
        return self.is_preparing or (self._job is not None and self._job.waits_for_copy)

    @property
    def is_preparing(self) -> bool:
        """Whether there is a job that ``start_prepared`` will begin."""
        return self._preparation is not None

    def free_bytes(self) -> int:
        """Of the device's memory, what a job that begins now could have."""
        free_bytes, total_bytes = self._device.memory_bytes()
        if self._device.torch_device.type == "cuda":
            return max(0, free_bytes - self._batch_bytes - self._reserved_bytes())
        return total_bytes  # other programs' memory comes and goes there, and so does what counts as free

    def _make_job(self, spec: JobSpec, prepared: Prepared | None) -> TrainingJob:
        return TrainingJob(
            self._decoder,
            spec,
            self._max_tasklet_tokens,
            self._tokenizer_folder,
            free_bytes=self.free_bytes() + (0 if prepared is None else prepared.device_bytes),
            device=self._device,
            limit_is_fixed=self._limit_is_fixed,
            prepared=prepared,
        )

    def pause(self, job_id: str) -> None:
        """Discard the step in flight and begin a checkpoint; ``publish`` answers ``JobPaused`` when it is on disk. What
        is being prepared is forgotten at once."""
        if self._forget_preparation(job_id):
            self._send(JobPaused(job_id, 0))
        elif self._job is not None and self._job_id == job_id:
            self._stop(self._ending if isinstance(self._ending, type) else JobPaused)

    def cancel(self, job_id: str) -> None:
        """Like ``pause``, for good. A job that is not running is confirmed as well: it has nothing left to stop."""
        if self._job is not None and self._job_id == job_id:
            self._stop(JobCancelled)
        else:
            self._forget_preparation(job_id)
            self._send(JobCancelled(job_id, 0))

    def pause_running(self) -> None:
        if self.job_id is not None:
            self.pause(self.job_id)

    def run_tasklet(self) -> TaskletShape:
        """Run the next tasklet. Call only when ``runnable``. One that finds no memory begins its micro-batch again, in
        less; what changes training's state cannot (see ``done_once``), and the optimizer does little else."""
        assert self._job is not None
        can_repeat = self._job.next_shape is not None and self._job.next_shape.kind is not TaskletKind.OPTIMIZER
        shape = self.attempt(self._job.run_tasklet, can_repeat=can_repeat) or NOTHING
        self.at_step_end = shape.kind is TaskletKind.OPTIMIZER or self._job is None
        if self.at_step_end:
            self._num_shortages = 0
        return shape

    def attempt(self, run: Callable[[], _Ran], *, can_repeat: bool) -> _Ran | None:
        """What ``run`` returns, which runs tasklets; None where an error in it has ended the job or, where it found no
        memory and ``can_repeat``, the micro-batch begins again in less."""
        is_short = False
        try:
            return run()
        except torch.OutOfMemoryError as error:
            is_short = can_repeat and self._num_shortages < _MOST_SHORTAGES
            if not is_short:
                self.fail(error)
        except Exception as error:
            self.fail(error)
        if is_short:  # what the attempt held is freed with its frames
            self._num_shortages += 1
            self.discard()
            if self._job is not None:  # whoever had the memory to give: a part of a tasklet has run
                self._job.discard_step()
        return None

    def discard(self) -> bool:
        """Give memory back: what arenas have kept for one another, or else the micro-batch in flight and what lies
        ready for the next. For a while micro-batches are smaller then, or their layers keep less: the next would else
        take all of it again. False if there was nothing to give."""
        if self._device.release_kept_memory():
            return True
        if self._job is None or not (self._job.in_flight or self._job.mapped_bytes):
            return False
        self._device.synchronize()
        self._job.discard_all()
        given = self._job.require(self._job.left_bytes // _SHORTAGE_SHARE)
        if self._job.max_tokens == 0:
            self._job.release(given)
            given = 0
        self._withheld_bytes += given
        self._withheld_until_s = self._clock() + _SHORTAGE_S
        logger.warning(
            "job %s gives up its micro-batch in flight, memory is short; for %.0f s they have at most %d tokens, and "
            "%d layers are computed again",
            self._job_id,
            _SHORTAGE_S,
            self._job.max_tokens,
            self._job.num_recomputed,
        )
        return True

    def begin_fused(self) -> FusedInput:
        assert self._job is not None
        return self._job.begin_fused()

    def end_fused(self, output: torch.Tensor, tape: LayerTape) -> None:
        assert self._job is not None
        self._job.end_fused(output, tape)

    def fail(self, error: Exception) -> None:
        """End the running job, if there is one, because of ``error``. It is told when the checkpoints before it are on
        disk, and these first."""
        if self._job is None:
            return
        logger.error("job %s failed at step %d", self._job_id, self._job.step, exc_info=error)
        self._device.wait_for_tasklets()
        self._job.stop_training()
        self._ending = _failure(self._job_id, self._job.step, error)
        self.publish()

    def publish(self) -> None:
        """Send what the job has to say; forget it once it has ended, or has stopped or failed and its checkpoint is on
        disk. Give it back what it went without, if memory has not been short for a while."""
        if self._job is None:
            return
        if self._withheld_bytes and self._ending is None and self._clock() >= self._withheld_until_s:
            self._job.release(self._withheld_bytes)
            self._withheld_bytes = 0
        for update in self._job.take_updates():
            self._send(update)
        if not self._job.done and (self._ending is None or self._job.writing):
            return
        ending = self._ending
        if isinstance(ending, JobFailed):
            if not self._job.done:
                self._send(ending)
            if self._answer is not None:
                self._send(self._answer(self._job_id, 0))
        elif ending is JobCancelled or (ending is JobPaused and not self._job.done):
            self._send(ending(self._job_id, self._job.step))
        self._forget()

    def _forget_preparation(self, job_id: str) -> bool:
        """Let nobody have what is being read for this job. False if nothing is."""
        if self._preparation is None or self._preparation.spec.job_id != job_id:
            return False
        self._preparation.result.cancel()
        self._preparation.is_forgotten.set()
        self._preparation = None
        return True

    def _wait_until_ended(self) -> None:
        """Of a job that is being stopped, or has failed: what succeeded is told before what failed."""
        while self._job is not None:
            self._job.wait_for_writes()
            self.publish()

    def _stop(self, answer: type[JobPaused] | type[JobCancelled]) -> None:
        """Run no more tasklets and begin a checkpoint. The files are written beside the loop, which goes on serving."""
        assert self._job is not None
        if isinstance(self._ending, JobFailed):
            self._answer = answer
            return
        if self._ending is None:
            self._device.wait_for_tasklets()
            try:
                self._job.begin_checkpoint()
            except Exception as error:
                self.fail(error)
                return
        self._ending = answer

    def _forget(self) -> None:
        """Free what the job holds, once the device has stopped using it; the rest is for ``tidy``."""
        assert self._job is not None
        self._tokens_before = self.trained_tokens
        self._device.wait_for_tasklets()
        self._job.close()
        self._job = None
        self._ending = self._answer = None
        self._withheld_bytes = 0
        self._num_shortages = 0


def _failure(job_id: str, step: int, error: Exception) -> JobFailed:
    """What the owner of a job reads that ``error`` ended."""
    if isinstance(error, CotenantError):
        return JobFailed(job_id, error.code or "invalid_job", error.message, step, param=error.param)
    message = f"{type(error).__name__}: {error}"
    if is_out_of_memory(error):
        ways_out = "lower --tasklet-tokens, or create one with a lower max_length"
        message = f"not enough memory for the job; {ways_out} ({message})"
        return JobFailed(job_id, "out_of_memory", message, step)
    return JobFailed(job_id, "internal_error", message, step)
