"""The files of new jobs are validated and tokenised one job after the other, in a child process each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from cotenant.api.jobs import events
from cotenant.api.jobs.failures import with_way_on
from cotenant.api.jobs.hyperparameters import AUTO, DatasetSize, resolve
from cotenant.api.jobs.job_folder import TRAINING_EXAMPLES, VALIDATION_EXAMPLES
from cotenant.api.jobs.prepare import prepare
from cotenant.api.jobs.prepare_main import FileTask, Task
from cotenant.api.jobs.values import Limits
from cotenant.api.jobs.wakeable import WakeableTask
from cotenant.config import ServerConfig
from cotenant.core.errors import CotenantError
from cotenant.core.job import SUPERVISED, Hyperparameters
from cotenant.store import JobError, JobRecord, JobStatus, NewEvent, Store
from cotenant.text.prepared_file import MIN_EXAMPLES, PreparedFile
from cotenant.wire.messages import Ready

logger = logging.getLogger(__name__)

_KILL_TIMEOUT_S = 10.0


def limits_of(ready: Ready, config: ServerConfig) -> Limits:
    """What the model and the server allow."""
    return Limits(ready.max_model_len, config.lora.max_lora_rank, ready.num_layers)


class Validator:
    """Takes jobs from ``validating_files`` to ``queued`` or ``failed``, in the order of their creation."""

    def __init__(
        self,
        store: Store,
        config: ServerConfig,
        base_folder: Path | None,
        base_fingerprint: str,
        model_facts: Callable[[], Ready | None],
        on_queued: Callable[[], None],
        deciding: asyncio.Lock,
    ) -> None:
        """``model_facts``: what the worker has said of the model, once it has. ``deciding``: held by whoever else
        changes a job's status, until ``abandon`` has returned; what is validated changes its own by comparing first."""
        self._store = store
        self._config = config
        self._base_folder = base_folder
        self._base_fingerprint = base_fingerprint
        self._model_facts = model_facts
        self._on_queued = on_queued
        self._deciding = deciding
        self._loop = WakeableTask("validation of files", self._validate_next)
        self._current: tuple[str, asyncio.Task[tuple[PreparedFile, ...]]] | None = None

    def start(self) -> None:
        self._loop.start()

    def wake(self) -> None:
        """There may be a job to validate."""
        self._loop.wake()

    async def stop(self) -> None:
        """Kill the child process, if there is one. Its job stays ``validating_files``."""
        await self._loop.stop()

    async def abandon(self, job_id: str) -> None:
        """The job's status has changed: if its files are being validated, stop that. Call it with ``deciding`` held.

        When it returns nothing writes into the job's folder any more, unless the system cannot kill the process: a job
        that has ended may be deleted next.
        """
        if self._current is not None and self._current[0] == job_id:
            preparing = self._current[1]
            preparing.cancel()
            done, _ = await asyncio.wait([preparing], timeout=_KILL_TIMEOUT_S)
            if not done:
                logger.warning("job %s: the process that validates its files does not end", job_id)

    async def _validate_next(self) -> bool:
        ready = self._model_facts()
        if ready is None:
            return False
        # Whoever changes the job's status does so before it is read here, or finds it in ``_current`` and abandons it:
        # no job that has ended gets a folder.
        async with self._deciding:
            job = await asyncio.to_thread(self._store.jobs.first, JobStatus.VALIDATING, self._base_fingerprint)
            if job is None:
                return False
            logger.info("job %s: validating its files", job.id)
            await asyncio.to_thread(self._store.jobs.make_folder, job.id)
            preparing = asyncio.create_task(prepare(self._task(job, ready)))
            self._current = (job.id, preparing)
        try:
            await asyncio.wait([preparing])
        finally:
            self._current = None
            preparing.cancel()
            await asyncio.gather(preparing, return_exceptions=True)
        if preparing.cancelled():
            return True
        await self._finish(job, preparing, limits_of(ready, self._config))
        return True

    async def _finish(self, job: JobRecord, preparing: asyncio.Task[tuple[PreparedFile, ...]], limits: Limits) -> None:
        try:
            files = preparing.result()
            size = DatasetSize(files[0].num_examples, files[0].num_tokens, files[0].max_tokens)
            settings = resolve(job.requested, size, limits)
        except CotenantError as error:
            logger.info("job %s: its files are refused: %s", job.id, error.message)
            refused = JobError(error.code or "invalid_files", error.message, error.param)
            now = with_way_on(refused, job, self._store.jobs.folder(job.id))
            await asyncio.to_thread(self._store.jobs.fail, job.id, (JobStatus.VALIDATING,), refused, now.message)
            return
        values = {"status": JobStatus.QUEUED, "hyperparameters": settings}
        happened = [*_warnings(files, settings), events.validated()]
        await asyncio.to_thread(self._store.jobs.change, job.id, (JobStatus.VALIDATING,), values, happened)
        self._on_queued()

    def _task(self, job: JobRecord, ready: Ready) -> Task:
        # Examples are encoded whole; ``max_length`` cuts them when they are trained on. Where it is not given, nobody
        # has said that what is longer than the model's context may be cut.
        given_length = job.requested.get("max_length", AUTO)
        files = [self._file_task(job, job.training_file, TRAINING_EXAMPLES, "training_file", MIN_EXAMPLES)]
        if job.validation_file is not None:
            files.append(self._file_task(job, job.validation_file, VALIDATION_EXAMPLES, "validation_file", 1))
        return Task(
            files=tuple(files),
            model_folder=None if self._base_folder is None else str(self._base_folder),
            chat_template=self._config.model.chat_template,
            vocab_size=ready.vocab_size,
            max_length=ready.max_model_len if given_length == AUTO else None,
            method=job.requested.get("method", SUPERVISED),
            cut_length=None if given_length == AUTO else given_length,
        )

    def _file_task(self, job: JobRecord, file_id: str, target: str, param: str, min_examples: int) -> FileTask:
        folder = self._store.jobs.folder(job.id)
        return FileTask(str(self._store.files.path(file_id)), str(folder / target), param, min_examples)


def _warnings(files: tuple[PreparedFile, ...], settings: Hyperparameters) -> list[NewEvent]:
    """A warning for each file with examples longer than the job trains on, and for a batch that is more than all. With
    packing a batch is of rows, which the worker counts and warns of."""
    names = ("training file", "validation file")
    num_examples = files[0].num_examples
    is_everything = settings.batch_size > num_examples and not settings.packing
    batch = [events.batch_is_everything(settings.batch_size, num_examples)] if is_everything else []
    return batch + [
        events.cut(name, file.max_tokens, settings.max_length)
        for name, file in zip(names, files, strict=False)
        if file.max_tokens > settings.max_length
    ]
