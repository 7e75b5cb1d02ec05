"""The best-effort tenant in the worker: at most one fine-tuning job, whatever goes wrong in it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from cotenant.core.errors import CotenantError
from cotenant.core.job import JobSpec
from cotenant.core.plan import JobView
from cotenant.core.tasklet import TaskletKind, TaskletShape
from cotenant.device import Device
from cotenant.finetune.job import FusedInput, TrainingJob
from cotenant.models.decoder import Decoder
from cotenant.wire.messages import FromWorker, JobCancelled, JobFailed, JobPaused

logger = logging.getLogger(__name__)


class TrainingTenant:
    """Starts, suspends and ends jobs. An error in a job ends that job, never the worker."""

    def __init__(
        self,
        device: Device,
        decoder: Decoder,
        tokenizer_folder: Path | None,
        max_tasklet_tokens: int,
        send: Callable[[FromWorker], None],
    ) -> None:
        self._device = device
        self._decoder = decoder
        self._tokenizer_folder = tokenizer_folder
        self._max_tasklet_tokens = max_tasklet_tokens
        self._send = send
        self._job: TrainingJob | None = None
        self._job_id = ""
        self._tokens_before = 0
        self._tokens_at_start = 0
        self.at_step_end = False

    @property
    def job_id(self) -> str | None:
        return self._job_id if self._job is not None else None

    @property
    def trained_tokens(self) -> int:
        """Tokens trained on by this worker, over all its jobs; it only grows."""
        return self._tokens_before + (self._job.trained_tokens - self._tokens_at_start if self._job else 0)

    @property
    def runnable(self) -> bool:
        return self._job is not None and bool(self._job.upcoming())

    @property
    def fusable_layer(self) -> int | None:
        return self._job.fusable_layer if self._job is not None else None

    def view(self) -> JobView | None:
        """The running job for the snapshot; None when there is none or it waits for its files to be written."""
        if self._job is None:
            return None
        upcoming = self._job.upcoming()
        return JobView(self._job_id, upcoming) if upcoming else None

    def start(self, spec: JobSpec) -> None:
        """Begin a job, or go on with it from its newest checkpoint."""
        if self._job is not None:
            if self._job_id == spec.job_id:
                return
            self._send(JobFailed(spec.job_id, "worker_busy", f"the worker is running job {self._job_id}", 0))
            return
        try:
            job = TrainingJob(self._decoder, spec, self._max_tasklet_tokens, self._tokenizer_folder)
        except (CotenantError, OSError, ValueError) as error:
            logger.warning("job %s cannot start: %s", spec.job_id, error)
            code = error.code if isinstance(error, CotenantError) and error.code else "invalid_job"
            self._send(JobFailed(spec.job_id, code, str(error), 0))
            return
        for update in job.start_updates():
            self._send(update)
        if job.done:
            job.close()
            return
        self._job, self._job_id = job, spec.job_id
        self._tokens_at_start = job.trained_tokens

    def pause(self, job_id: str) -> None:
        """Discard the step in flight, write a checkpoint and free everything."""
        step = self._suspend(job_id)
        if step is not None:
            self._send(JobPaused(job_id, step))

    def cancel(self, job_id: str) -> None:
        """Like ``pause``, for good. A job that is not running is confirmed as well: it has nothing left to stop."""
        step = self._suspend(job_id)
        self._send(JobCancelled(job_id, step or 0))

    def pause_running(self) -> None:
        if self._job is not None:
            self.pause(self._job_id)

    def run_tasklet(self) -> TaskletShape:
        """Run the next tasklet. Call only when ``runnable``."""
        assert self._job is not None
        try:
            shape = self._job.run_tasklet()
        except Exception as error:
            shape = TaskletShape(TaskletKind.OPTIMIZER, 0)
            self._fail(error)
        self.at_step_end = shape.kind is TaskletKind.OPTIMIZER
        return shape

    def begin_fused(self) -> FusedInput:
        assert self._job is not None
        return self._job.begin_fused()

    def end_fused(self, output: torch.Tensor) -> None:
        assert self._job is not None
        self._job.end_fused(output)

    def publish(self) -> None:
        """Send what the job has to say; forget it once it has ended."""
        if self._job is None:
            return
        for update in self._job.take_updates():
            self._send(update)
        if self._job.done:
            self._forget()

    def _suspend(self, job_id: str) -> int | None:
        """Stop this job with a checkpoint and return its step; None if it is not running (or has just ended)."""
        if self._job is None or self._job_id != job_id:
            return None
        job = self._job
        self._device.synchronize()
        job.discard_step()
        try:
            for update in job.checkpoint():
                self._send(update)
        except OSError as error:
            logger.error("job %s: no checkpoint at step %d: %s; it goes on from the last one", job_id, job.step, error)
        for update in job.take_updates():
            self._send(update)
        step = None if job.done else job.step
        self._forget()
        return step

    def _fail(self, error: Exception) -> None:
        assert self._job is not None
        out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        logger.exception("job %s failed at step %d", self._job_id, self._job.step)
        for update in self._job.take_updates():
            self._send(update)
        message = str(error) if isinstance(error, CotenantError) else f"{type(error).__name__}: {error}"
        if out_of_memory:
            message = f"not enough memory for a micro-batch; lower --tasklet-tokens or max_length ({message})"
        self._send(
            JobFailed(self._job_id, "out_of_memory" if out_of_memory else "internal_error", message, self._job.step)
        )
        self._forget()

    def _forget(self) -> None:
        assert self._job is not None
        self._tokens_before = self.trained_tokens
        self._job.close()
        self._job = None
