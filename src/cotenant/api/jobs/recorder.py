"""What the worker says about jobs, written into the store. Everything may be said twice and is then written once."""

from __future__ import annotations

import logging
import time
from enum import Enum
from pathlib import Path
from typing import Any

from cotenant.api.jobs import events
from cotenant.api.jobs.deletion import forget_missing_checkpoints
from cotenant.api.jobs.failures import is_mendable, with_way_on
from cotenant.api.jobs.job_folder import checkpoints_in, is_whole, metrics_in
from cotenant.api.jobs.results import FILENAME, RESULT_PURPOSE, metrics_csv
from cotenant.core.errors import NotFoundError
from cotenant.store import FileRecord, JobError, JobRecord, JobStatus, Pending, Store, StoreError
from cotenant.store.adapters import checkpoint_name
from cotenant.wire.messages import (
    CheckpointSaved,
    JobCancelled,
    JobFailed,
    JobMetrics,
    JobPaused,
    JobStarted,
    JobSucceeded,
    JobWarning,
)

logger = logging.getLogger(__name__)

_RUNNING = (JobStatus.RUNNING,)


JobMessage = (
    JobStarted | JobWarning | JobMetrics | CheckpointSaved | JobPaused | JobCancelled | JobSucceeded | JobFailed
)


class Outcome(Enum):
    """What a message means for the queue."""

    NOTHING = "nothing"
    PROGRESS = "progress"  # steps were taken that were never taken before
    LEFT_WORKER = "left worker"  # the worker does not run this job any more


class Recorder:
    """Writes messages into the store, one at a time, in the order in which the worker sent them. Synchronous."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def record(self, message: JobMessage, *, draining: bool) -> Outcome:
        """Write one message; one about a job that is unknown or over changes nothing. Raises StoreError.

        ``draining``: the server is about to end, so a job that the worker has paused unasked stays ``running`` and goes
        on when the server is back.
        """
        match message:
            case JobStarted():
                return self._started(message)
            case JobWarning():
                return self._warning(message)
            case JobMetrics():
                return self._metrics(message)
            case CheckpointSaved():
                return self._checkpoint(message)
            case JobPaused():
                return self._paused(message, draining)
            case JobCancelled():
                return self._cancelled(message)
            case JobSucceeded():
                return self._succeeded(message)
            case JobFailed():
                return self._failed(message)

    def cancel(self, job: JobRecord) -> JobRecord | None:
        """End a job that the worker does not run (any more). What it had reached is kept as checkpoint models."""
        self._keep_checkpoints(job)
        changed = self._store.jobs.change(job.id, (job.status,), {"status": JobStatus.CANCELLED}, [events.cancelled()])
        if changed is not None:
            logger.info("job %s: cancelled", job.id)
        return changed

    def pause(self, job: JobRecord) -> JobRecord | None:
        """Set a job aside that the worker does not run (any more)."""
        changed = self._store.jobs.change(job.id, (job.status,), {"status": JobStatus.PAUSED}, [events.paused()])
        if changed is not None:
            logger.info("job %s: paused", job.id)
        return changed

    def fail(self, job: JobRecord, error: JobError, bad_step: int | None = None) -> None:
        """End a running job that cannot go on. What it had reached is kept as with ``cancel``, if the disk has room for
        saying so: that the job has failed is said in any case, and how it can be resumed. ``bad_step``, as in
        ``JobFailed``, has to be taken off the list first: raises StoreError where it cannot be."""
        if bad_step is not None:
            self._store.events.remove_checkpoint(job.id, bad_step, events.checkpoint_withdrawn(bad_step))
        try:
            self._keep_checkpoints(job, bad_step, may_go_on=is_mendable(error))
        except StoreError as problem:
            logger.warning("job %s has failed, and its last checkpoints are not listed: %s", job.id, problem.message)
        now = with_way_on(error, job, self._store.jobs.folder(job.id))
        self._store.jobs.fail(job.id, _RUNNING, error, now.message)
        logger.warning("job %s: failed (%s): %s", job.id, error.code, error.message)

    def _job(self, job_id: str) -> JobRecord | None:
        try:
            return self._store.jobs.get(job_id)
        except NotFoundError:
            logger.warning("the worker speaks of job %s, which is unknown", job_id)
            return None

    def _started(self, message: JobStarted) -> Outcome:
        job = self._job(message.job_id)
        if job is not None:
            event = events.started() if job.total_steps is None else events.goes_on(message.resumed_step)
            # A job that has stopped early knows of fewer steps when it is taken up again; the first word stands.
            total_steps = message.total_steps if job.total_steps is None else job.total_steps
            # What was estimated is over: the job has stood still since.
            values = {"total_steps": total_steps, "estimated_finish": None}
            self._store.jobs.change(job.id, _RUNNING, values, [event])
            forget_missing_checkpoints(self._store, job.id)
        return Outcome.NOTHING

    def _warning(self, message: JobWarning) -> Outcome:
        """A worker that begins the job anew warns anew."""
        if not self._store.events.has(message.job_id, message.message):
            running = {"status": JobStatus.RUNNING}
            self._store.jobs.change(message.job_id, _RUNNING, running, [events.warning(message.message)])
        return Outcome.NOTHING

    def _metrics(self, message: JobMetrics) -> Outcome:
        job = self._job(message.job_id)
        if job is None or job.finished:
            return Outcome.NOTHING
        finish = None
        if job.status is JobStatus.RUNNING and message.remaining_s is not None:
            finish = round(time.time() + message.remaining_s)
        num_new = self._store.events.add_metrics(
            job.id, [events.step(step, job.total_steps) for step in message.steps], message.trained_tokens, finish
        )
        return Outcome.PROGRESS if num_new else Outcome.NOTHING

    def _checkpoint(self, message: CheckpointSaved) -> Outcome:
        job = self._job(message.job_id)
        if job is None:
            return Outcome.NOTHING
        # What this one has taken the place of goes first, so that the order does not depend on when that is noticed.
        forget_missing_checkpoints(self._store, job.id)
        created = events.checkpoint(message.step)
        if is_whole(Path(message.path)):
            metrics = None if message.metrics is None else events.figures(message.metrics)
            self._add_checkpoint(job, message.step, message.path, metrics)
            forget_missing_checkpoints(self._store, job.id)  # if it went in this moment
        elif not self._store.events.has(job.id, created.message):
            # A later one has taken its place already. (What is said again after a crash may have been deleted since,
            # which is known.)
            self._store.events.add(job.id, [created, events.checkpoint_deleted(message.step)])
        return Outcome.NOTHING

    def _paused(self, message: JobPaused, draining: bool) -> Outcome:
        job = self._job(message.job_id)
        if job is None or job.status is not JobStatus.RUNNING or job.pending is Pending.CANCEL:
            return Outcome.NOTHING  # in the last case JobCancelled follows
        if job.pending is Pending.PAUSE:
            self.pause(job)
        elif not draining:  # the client has changed its mind and resumed it before it was paused
            self._store.jobs.change(job.id, _RUNNING, {"status": JobStatus.QUEUED})
        return Outcome.LEFT_WORKER

    def _cancelled(self, message: JobCancelled) -> Outcome:
        job = self._job(message.job_id)
        if job is None or job.status is not JobStatus.RUNNING:
            return Outcome.NOTHING
        self.cancel(job)
        return Outcome.LEFT_WORKER

    def _succeeded(self, message: JobSucceeded) -> Outcome:
        job = self._job(message.job_id)
        if job is None or job.status is not JobStatus.RUNNING:
            return Outcome.NOTHING
        happened = events.succeeded(job.adapter_name, message.best_step)
        if job.total_steps is not None and message.total_steps < job.total_steps:
            happened.insert(0, events.stopped_early(message.total_steps, job.total_steps))
        try:
            result_file = self._place_results(job.id)
        except StoreError as error:
            logger.error("job %s: no result file: %s", job.id, error.message)
            result_file = None
            happened.insert(0, events.no_result_file(error.message))
        try:
            self._store.jobs.succeed(
                job.id,
                adapter_path=message.path,
                trained_tokens=message.trained_tokens,
                total_steps=message.total_steps,
                result_file=result_file,
                events=happened,
            )
        except BaseException:
            if result_file is not None:
                self._store.files.remove_content(result_file.id)
            raise
        logger.info("job %s: succeeded after %d steps", job.id, message.total_steps)
        return Outcome.LEFT_WORKER

    def _failed(self, message: JobFailed) -> Outcome:
        job = self._job(message.job_id)
        if job is None or job.status is not JobStatus.RUNNING:
            return Outcome.NOTHING
        self.fail(job, JobError(message.code, message.message, message.param), message.bad_step)
        return Outcome.LEFT_WORKER

    def _place_results(self, job_id: str) -> FileRecord:
        """The metrics file, on disk and without its row, which comes with the job's new status."""
        content = metrics_csv(self._store.events.metrics(job_id))
        file_id = self._store.files.place(content)
        return FileRecord(file_id, int(time.time()), FILENAME, RESULT_PURPOSE, len(content))

    def _add_checkpoint(self, job: JobRecord, step: int, path: str, metrics: dict[str, Any] | None) -> None:
        name = checkpoint_name(job.adapter_name, step)
        self._store.events.add_checkpoint(job.id, step, name, path, metrics, events.checkpoint(step))

    def _keep_checkpoints(self, job: JobRecord, bad_step: int | None = None, *, may_go_on: bool = False) -> None:
        """The worker has written checkpoints for itself, of the last step and the best one; now that the job is over,
        announce what is left of them, but for that of ``bad_step``. A step whose evaluation was still to come has not
        been reported: it is now, by what its checkpoint has, unless the job ``may_go_on`` and evaluate it."""
        found = checkpoints_in(self._store.jobs.folder(job.id))
        reported = {data["step"]: data for data in self._store.events.metrics(job.id)} if found else {}
        for step, path in found:
            if step == bad_step:
                continue
            figures = reported.get(step)
            if figures is None and not may_go_on and (metrics := metrics_in(path)) is not None:
                figures = events.figures(metrics)
                event = events.step(metrics, job.total_steps)
                self._store.events.add_metrics(job.id, [event], job.trained_tokens or 0, job.estimated_finish)
            self._add_checkpoint(job, step, str(path), figures)
