"""The queue of fine-tuning jobs: created, validated, run one at a time in the order of their creation, and stopped."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Protocol

from cotenant.api.jobs import events
from cotenant.api.jobs.create import CreateJobRequest, make_job
from cotenant.api.jobs.deletion import delete_job, delete_model, forget_missing_checkpoints
from cotenant.api.jobs.failures import why_not_resumable
from cotenant.api.jobs.job_folder import TRAINING_EXAMPLES, VALIDATION_EXAMPLES
from cotenant.api.jobs.recorder import JobMessage, Outcome, Recorder
from cotenant.api.jobs.validator import Validator, limits_of
from cotenant.api.jobs.wakeable import WakeableTask
from cotenant.config import ServerConfig
from cotenant.core.errors import DISK_FULL, InvalidInputError, OverloadedError
from cotenant.core.job import JobSpec
from cotenant.store import JobError, JobRecord, JobStatus, NewEvent, Pending, Store, StoreError
from cotenant.wire.messages import CancelJob, FromWorker, PauseJob, Ready, StartJob, ToWorker, UnloadAdapter

logger = logging.getLogger(__name__)

# How long a request to stop a job waits for the worker, which needs milliseconds when it is there.
SETTLE_TIMEOUT_S = 10.0
# Waits between attempts to write down what the worker has said, the last one again and again: a job whose end was never
# stored would keep all others out of the worker.
RETRY_DELAYS_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
# A job that the worker has died on this often, without one new step between, is taken to be the reason.
MAX_FRUITLESS_DEATHS = 4
READY_OR_RUNNING = (JobStatus.QUEUED, JobStatus.RUNNING)
WAITING_OR_RUNNING = (JobStatus.VALIDATING, *READY_OR_RUNNING)


class WorkerLink(Protocol):
    """What is needed of the worker's client."""

    @property
    def ready(self) -> Ready | None:
        """What the worker said when it was ready; None while there is none."""

    @property
    def last_ready(self) -> Ready | None:
        """The same of the newest worker that ever was ready."""

    def post(self, message: ToWorker) -> bool:
        """Send, in order and without waiting. False if no worker is ready."""


class JobManager:
    """Owns every change of a job's status. The store is the truth; here is only what the worker was last told."""

    def __init__(
        self,
        store: Store,
        worker: WorkerLink,
        config: ServerConfig,
        base_folder: Path | None,
        base_fingerprint: str,
    ) -> None:
        """``base_folder`` holds the base model's tokenizer; None with random weights. Jobs of base models with another
        ``base_fingerprint`` wait until those are served."""
        self._store = store
        self._worker = worker
        self._config = config
        self._base_folder = base_folder
        self._base_fingerprint = base_fingerprint
        self._recorder = Recorder(store)
        self._dispatcher = WakeableTask("queue of jobs", self._dispatch)
        # Held from reading a job's status until the store, the worker and the validator know what follows from it.
        self._deciding = asyncio.Lock()
        self._validator = Validator(
            store,
            config,
            base_folder,
            base_fingerprint,
            lambda: worker.last_ready,
            self._dispatcher.wake,
            self._deciding,
        )
        self._in_worker: str | None = None
        self._fruitless_deaths = 0
        self._settled: dict[str, asyncio.Event] = {}
        self._draining = asyncio.Event()

    async def start(self) -> None:
        """Take up what the store holds. Jobs run once the worker is ready."""
        try:
            await asyncio.to_thread(forget_missing_checkpoints, self._store)
        except StoreError as error:
            logger.warning("checkpoints that are gone may still be listed: %s", error.message)
        self._validator.start()
        self._dispatcher.start()

    async def stop(self) -> None:
        """End the background work. Jobs stay as they are and go on with the next ``start``."""
        self.begin_drain()
        await self._validator.stop()
        await self._dispatcher.stop()

    def begin_drain(self) -> None:
        """The server is about to end: start no job any more, and leave the status of the running one as it is."""
        self._draining.set()

    # What clients ask

    async def create(self, body: CreateJobRequest) -> JobRecord:
        """Store a new job, whose files are then validated. Raises InvalidInputError, NotFoundError, OverloadedError."""
        ready = self._worker.last_ready
        if ready is None:
            raise OverloadedError("The model is still being loaded; try again in a moment.", code="loading")
        if self._draining.is_set():
            raise OverloadedError("The server is shutting down.", code="shutting_down")
        limits = limits_of(ready, self._config)

        def create() -> JobRecord:
            job = make_job(body, self._config, self._base_folder, self._base_fingerprint, self._store, limits)
            happened = events.created(job.id, job.training_file, job.validation_file)
            return self._store.jobs.create(job, happened)

        created = await asyncio.to_thread(create)
        logger.info("job %s: created", created.id)
        self._validator.wake()
        return created

    async def cancel(self, job_id: str) -> JobRecord:
        """End a job that has not ended. Its checkpoints stay, the last one included."""
        return await self._stop(job_id, Pending.CANCEL)

    async def pause(self, job_id: str) -> JobRecord:
        """Set a job aside; the next one in the queue may run. It goes on from where it was."""
        return await self._stop(job_id, Pending.PAUSE)

    async def resume(self, job_id: str) -> JobRecord:
        """Put a job that was paused, or has failed for what can be mended, back to its place in the queue, which the
        time of its creation gives."""
        async with self._deciding:
            job = await asyncio.to_thread(self._store.jobs.get, job_id)
            if job.status is JobStatus.RUNNING and job.pending is Pending.PAUSE:
                # On its way out of the worker; when it is out, it is queued.
                resumed = await self._change(job, {"pending": None}, [events.resumed()])
            elif job.status is JobStatus.PAUSED:
                status = JobStatus.VALIDATING if job.hyperparameters is None else JobStatus.QUEUED
                resumed = await self._change(job, {"status": status}, [events.resumed()])
            elif job.status is JobStatus.FAILED:
                resumed = await asyncio.to_thread(self._take_up, job)
            else:
                is_ending = job.pending is Pending.CANCEL
                reason = "it is being cancelled" if is_ending else "only a paused or failed job can be"
                raise _wrong_status(job, "resumed", reason)
        logger.info("job %s: resumed", job.id)
        self._validator.wake()
        self._dispatcher.wake()
        return resumed

    async def delete_model(self, name: str) -> None:
        """Delete a job's result or one of its checkpoints; requests that run on it end as they would have. Raises
        NotFoundError, ConflictError for a checkpoint that its job still needs."""
        async with self._deciding:
            path = await asyncio.to_thread(delete_model, self._store, name)
        self._worker.post(UnloadAdapter(name, path))
        logger.info("model %s: deleted", name)

    async def delete(self, job_id: str) -> None:
        """Delete a job that has ended and all that it has made. Raises NotFoundError, ConflictError."""
        async with self._deciding:
            job = await asyncio.to_thread(self._store.jobs.get, job_id)
            paths = await asyncio.to_thread(delete_job, self._store, job)
        for name, path in paths.items():
            self._worker.post(UnloadAdapter(name, path))
        logger.info("job %s: deleted", job.id)

    # What the worker says

    async def on_worker_ready(self, ready: Ready | None = None) -> None:
        """A new worker is ready and knows of no job; all messages of the one before have been handled."""
        if self._in_worker is not None:
            self._fruitless_deaths += 1
            logger.warning("job %s: the worker died while it ran this job", self._in_worker)
            self._in_worker = None
        self._validator.wake()
        self._dispatcher.wake()

    async def on_worker_message(self, message: FromWorker) -> None:
        """Write down what the worker says of a job. If the store cannot be written, that is tried again until it can;
        meanwhile later messages wait, and nothing else does. Raises StoreError if the server ends before: the worker
        says it again when it is back, because the job goes on from what is stored."""
        if not isinstance(message, JobMessage):
            return
        for delay_s in chain(RETRY_DELAYS_S, repeat(RETRY_DELAYS_S[-1])):
            try:
                async with self._deciding:
                    draining = self._draining.is_set()
                    outcome = await asyncio.to_thread(self._recorder.record, message, draining=draining)
                    if outcome is Outcome.LEFT_WORKER:
                        self._left_worker(message.job_id)
                if outcome is Outcome.PROGRESS:
                    self._fruitless_deaths = 0
                return
            except StoreError as error:
                if self._draining.is_set():
                    raise
                logger.error("%s of a job could not be stored: %s", type(message).__name__, error.message)
                await self._sleep(delay_s)

    # Inside

    async def _stop(self, job_id: str, goal: Pending) -> JobRecord:
        async with self._deciding:
            job = await asyncio.to_thread(self._store.jobs.get, job_id)
            _check_can_stop(job, goal)
            if job.id != self._in_worker or self._worker.ready is None:
                stopped = await self._settle(job, goal)
                self._dispatcher.wake()
                return stopped
            # First in the store: whatever happens to the two processes, it is not forgotten.
            await self._change(job, {"pending": goal})
            settled = self._settled.setdefault(job.id, asyncio.Event())
            self._worker.post(CancelJob(job.id) if goal is Pending.CANCEL else PauseJob(job.id))
        try:
            await asyncio.wait_for(settled.wait(), SETTLE_TIMEOUT_S)
        except TimeoutError:
            logger.warning("job %s: the worker has not confirmed the %s yet", job.id, goal)
            if job.pending is not goal:  # it was not asked for before
                await self._say_requested(job.id, goal)
        return await asyncio.to_thread(self._store.jobs.get, job_id)

    async def _say_requested(self, job_id: str, goal: Pending) -> None:
        """An event that tells of a stop that is still to come, if it is."""
        async with self._deciding:
            job = await asyncio.to_thread(self._store.jobs.get, job_id)
            if job.pending is goal:
                await asyncio.to_thread(self._store.events.add, job_id, [events.requested(goal)])

    async def _settle(self, job: JobRecord, goal: Pending) -> JobRecord:
        """Pause or cancel a job that is not in the worker."""
        settle = self._recorder.cancel if goal is Pending.CANCEL else self._recorder.pause
        while (stopped := await asyncio.to_thread(settle, job)) is None:
            # Its validation has ended in this moment. From here on nothing but us changes its status.
            job = await asyncio.to_thread(self._store.jobs.get, job.id)
            _check_can_stop(job, goal)
        await self._validator.abandon(job.id)
        self._signal_settled(job.id)
        return stopped

    def _take_up(self, job: JobRecord) -> JobRecord:
        """Have a job go on that has failed. Raises InvalidInputError, or StoreError if the disk is as full as it was
        then."""
        assert job.error is not None, "a job that has failed says why"
        reason = why_not_resumable(job, self._store.jobs.folder(job.id), job.error)
        if reason is not None:
            raise _wrong_status(job, "resumed", reason)
        if job.error.code == DISK_FULL:
            self._store.check_room()  # each time that it goes on and fails at once takes some of what is left
        try:
            resumed = self._store.jobs.take_up(job.id, [events.resumed()])
        except InvalidInputError as error:
            message = f"{error.message} It was still to be validated; create a new job with another file."
            raise InvalidInputError(message, code=error.code, param=error.param) from error
        assert resumed is not None, f"job {job.id} had failed, and only we change that"
        return resumed

    async def _dispatch(self) -> bool:
        """Give the worker a job if it has none. True if that may be worth another look."""
        async with self._deciding:
            if self._draining.is_set():
                return False
            await self._hold_back()
            if not self._config.coexecution.trains or self._worker.ready is None or self._in_worker is not None:
                return False
            job = await self._first(JobStatus.RUNNING)
            if job is not None and job.pending is not None:
                await self._settle(job, job.pending)
                return True
            if job is not None and self._fruitless_deaths >= MAX_FRUITLESS_DEATHS:
                await self._give_up(job)
                return True
            if job is None:
                job = await self._next_in_queue()
            if job is None:
                return False
            await asyncio.to_thread(self._store.files.restore_ballast)  # so that a full disk can be recorded
            spec = await asyncio.to_thread(self._spec_of, job)
            if self._draining.is_set():  # since: behind Drain, the job would keep the worker from ending
                return False
            if self._worker.post(StartJob(spec)):
                self._in_worker = job.id
                logger.info("job %s: started in the worker (%d steps are on record)", job.id, spec.recorded_step)
            return False

    async def _hold_back(self) -> None:
        """Jobs that this server cannot run wait for one that can."""
        others = self._store.jobs.of_other_bases
        for job in await asyncio.to_thread(others, WAITING_OR_RUNNING, self._base_fingerprint):
            await self._keep_waiting(job, events.of_another_base(job))
        for job in await self._of_base(READY_OR_RUNNING):
            if not self._config.coexecution.trains:
                await self._keep_waiting(job, events.nothing_trains(self._config.coexecution.policy))
            elif not self._can_be_served(job):
                limit = self._config.lora.max_lora_rank
                await self._keep_waiting(job, events.rank_is_too_high(_rank_of(job), limit))

    async def _keep_waiting(self, job: JobRecord, reason: NewEvent) -> None:
        """The job stays where it is, or goes back to the queue, and says once why."""
        if job.pending is not None:
            await self._settle(job, job.pending)
            return
        status = JobStatus.QUEUED if job.status is JobStatus.RUNNING else job.status
        newest = await asyncio.to_thread(self._store.events.page, job.id, limit=1)
        is_said = [event.message for event in newest.items] == [reason.message]
        if status is not job.status or not is_said:
            await self._change(job, {"status": status}, [] if is_said else [reason])
        if not is_said:
            logger.warning("job %s waits: %s", job.id, reason.message)

    def _can_be_served(self, job: JobRecord) -> bool:
        return _rank_of(job) <= self._config.lora.max_lora_rank

    async def _of_base(self, statuses: Collection[JobStatus]) -> list[JobRecord]:
        """The jobs of the base model that is served, oldest first."""
        return await asyncio.to_thread(self._store.jobs.of_base, statuses, self._base_fingerprint)

    async def _first(self, status: JobStatus) -> JobRecord | None:
        """The first job that this server can train and serve."""
        return next(filter(self._can_be_served, await self._of_base((status,))), None)

    async def _next_in_queue(self) -> JobRecord | None:
        """The first queued job, made ``running``."""
        job = await self._first(JobStatus.QUEUED)
        if job is None:
            return None
        self._fruitless_deaths = 0
        started_at = job.started_at or int(time.time())
        return await self._change(job, {"status": JobStatus.RUNNING, "pending": None, "started_at": started_at})

    async def _give_up(self, job: JobRecord) -> None:
        error = JobError(
            "worker_died",
            f"The worker died {self._fruitless_deaths} times while it ran this job, without a step between. "
            "The server's log says more; perhaps the job needs more memory than there is.",
        )
        await asyncio.to_thread(self._recorder.fail, job, error)
        self._signal_settled(job.id)

    def _spec_of(self, job: JobRecord) -> JobSpec:
        assert job.hyperparameters is not None, "a queued job has been validated"
        folder = self._store.jobs.folder(job.id)
        return JobSpec(
            job_id=job.id,
            base_model=job.base_root,
            folder=str(folder),
            dataset_path=str(folder / TRAINING_EXAMPLES),
            validation_path=None if job.validation_file is None else str(folder / VALIDATION_EXAMPLES),
            adapter_name=job.adapter_name,
            hyperparameters=job.hyperparameters,
            recorded_step=self._store.events.recorded_step(job.id),
        )

    async def _change(self, job: JobRecord, values: Mapping[str, Any], happened: Sequence[NewEvent] = ()) -> JobRecord:
        """Change a job whose status cannot have changed since it was read."""
        changed = await asyncio.to_thread(self._store.jobs.change, job.id, (job.status,), values, happened)
        assert changed is not None, f"job {job.id} was {job.status}, and only we change that"
        return changed

    def _left_worker(self, job_id: str) -> None:
        if self._in_worker == job_id:
            self._in_worker = None
        self._signal_settled(job_id)
        self._dispatcher.wake()

    def _signal_settled(self, job_id: str) -> None:
        settled = self._settled.pop(job_id, None)
        if settled is not None:
            settled.set()

    async def _sleep(self, delay_s: float) -> None:
        """Wait, but not while the server waits to end."""
        try:
            await asyncio.wait_for(self._draining.wait(), delay_s)
        except TimeoutError:
            return


def _check_can_stop(job: JobRecord, goal: Pending) -> None:
    if job.finished:
        raise _wrong_status(job, "cancelled" if goal is Pending.CANCEL else "paused", "it has ended")
    if goal is Pending.PAUSE and job.status is JobStatus.PAUSED:
        raise _wrong_status(job, "paused", "it is already")
    if goal is Pending.PAUSE and job.pending is Pending.CANCEL:
        raise _wrong_status(job, "paused", "it is being cancelled")


def _rank_of(job: JobRecord) -> int:
    assert job.hyperparameters is not None, "a queued job has been validated"
    return job.hyperparameters.max_rank


def _wrong_status(job: JobRecord, action: str, reason: str) -> InvalidInputError:
    return InvalidInputError(
        f"Job '{job.id}' has status '{job.status}' and cannot be {action}: {reason}.",
        code="invalid_job_status",
        param="fine_tuning_job_id",
    )
