"""Fine-tuning jobs. Every change states which statuses it may start from, so that no two changes can cross."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, Select, delete, func, insert, select, update

from cotenant.core.errors import NotFoundError
from cotenant.core.job import Hyperparameters
from cotenant.durable import fsync_path
from cotenant.store import schema
from cotenant.store.database import Database
from cotenant.store.errors import store_error
from cotenant.store.events import insert_events
from cotenant.store.files import insert_file, missing_file
from cotenant.store.paging import DeletedPlaces, read_page
from cotenant.store.paths import relative_path
from cotenant.store.records import FINISHED, FileRecord, JobError, JobRecord, JobStatus, NewEvent, NewJob, Page, Pending

JOBS_FOLDER = "jobs"
JOB_ID_PREFIX = "ftjob-"

_COLUMNS = schema.jobs.c


class JobStore:
    """The jobs of a data folder, and the folder of each."""

    def __init__(self, folder: Path, database: Database) -> None:
        self._data_folder = folder
        self._database = database
        self._deleted = DeletedPlaces()
        self._ends: Counter[tuple[JobStatus, str]] = Counter()
        self._counting = threading.Lock()

    def folder(self, job_id: str) -> Path:
        """Where a stored job keeps its examples, checkpoints and adapter. ``job_id`` must be one of ours."""
        return self._data_folder / JOBS_FOLDER / job_id

    def make_folder(self, job_id: str) -> Path:
        """The same, made if it isn't there. Raises StoreError."""
        folder = self.folder(job_id)
        try:
            folder.mkdir(exist_ok=True)
            fsync_path(folder.parent)
        except OSError as error:
            raise store_error(error) from error
        return folder

    def create(self, job: NewJob, events: Sequence[NewEvent]) -> JobRecord:
        """Store a job as ``validating_files``. Raises InvalidInputError if one of its files is gone,
        StoreError."""

        def work(connection: Connection) -> JobRecord:
            _require_files(connection, job)
            connection.execute(
                insert(schema.jobs).values(
                    id=job.id,
                    created_at=_now(),
                    status=JobStatus.VALIDATING,
                    model=job.model,
                    base_root=job.base_root,
                    base_fingerprint=job.base_fingerprint,
                    training_file=job.training_file,
                    validation_file=job.validation_file,
                    suffix=job.suffix,
                    metadata=_json(job.metadata),
                    requested=_json(job.requested),
                    adapter_name=job.adapter_name,
                )
            )
            insert_events(connection, job.id, events)
            return self._get(connection, job.id)

        return self._database.write(work)

    def get(self, job_id: str) -> JobRecord:
        """Raises NotFoundError."""
        return self._database.read(lambda connection: self._get(connection, job_id))

    def page(
        self, *, after: str | None = None, limit: int = 20, metadata: Mapping[str, str] | None = MappingProxyType({})
    ) -> Page[JobRecord]:
        """A page of jobs, newest first; of those that have all of ``metadata``, or with None of those that have none.
        Raises InvalidInputError for an unknown ``after``."""
        query = select(schema.jobs)
        if metadata is None:
            query = query.where(_COLUMNS.metadata.is_(None))
        for key, value in (metadata or {}).items():
            query = query.where(func.has_pair(_COLUMNS.metadata, key, value))
        return self._database.read(
            lambda connection: read_page(
                connection, query, schema.jobs, self._job_of, after=after, limit=limit, deleted=self._deleted.find
            )
        )

    def first(self, status: JobStatus, base_fingerprint: str) -> JobRecord | None:
        """The job that was created first of those with this status and base model."""
        is_of_base = ~_is_of_another(base_fingerprint)
        query = select(schema.jobs).where(_COLUMNS.status == status, is_of_base).order_by(_COLUMNS.sequence).limit(1)
        return self._database.read(lambda connection: self._one(connection, query))

    def of_base(self, statuses: Collection[JobStatus], base_fingerprint: str) -> list[JobRecord]:
        """All jobs with these statuses and this base model, oldest first."""
        return self._all(statuses, ~_is_of_another(base_fingerprint))

    def of_other_bases(self, statuses: Collection[JobStatus], base_fingerprint: str) -> list[JobRecord]:
        """All jobs with these statuses whose base model is another one, oldest first."""
        return self._all(statuses, _is_of_another(base_fingerprint))

    def _all(self, statuses: Collection[JobStatus], condition: ColumnElement[bool]) -> list[JobRecord]:
        query = select(schema.jobs).where(_COLUMNS.status.in_(statuses), condition)
        rows = self._database.read(lambda connection: connection.execute(query.order_by(_COLUMNS.sequence)).all())
        return [self._job_of(row) for row in rows]

    def counts(self) -> dict[JobStatus, int]:
        """How many jobs have each status, of whatever base model."""
        query = select(_COLUMNS.status, func.count()).group_by(_COLUMNS.status)
        rows = self._database.read(lambda connection: connection.execute(query).all())
        return dict.fromkeys(JobStatus, 0) | {JobStatus(status): count for status, count in rows}

    def ends(self) -> dict[tuple[JobStatus, str], int]:
        """How many jobs have ended since the store was opened, by status and the error's code (empty without an error).
        One that fails, is resumed and ends again counts twice."""
        with self._counting:
            return dict(self._ends)

    def find_succeeded(self, adapter_name: str) -> JobRecord | None:
        """The job that has this name for its result, if it has one."""
        query = select(schema.jobs).where(_COLUMNS.adapter_name == adapter_name, _COLUMNS.status == JobStatus.SUCCEEDED)
        return self._database.read(lambda connection: self._one(connection, query))

    def delete(self, job_id: str) -> None:
        """Delete the record of a job that has ended, its events and the list of its checkpoints. Raises StoreError."""

        def work(connection: Connection) -> None:
            for table in (schema.events, schema.checkpoints):
                connection.execute(delete(table).where(table.c.job_id == job_id))
            gone = delete(schema.jobs).where(_COLUMNS.id == job_id).returning(_COLUMNS.sequence)
            sequence = connection.execute(gone).scalar_one_or_none()
            if sequence is not None:
                self._deleted.add(job_id, sequence)

        self._database.write(work)

    def change(
        self,
        job_id: str,
        allowed: Collection[JobStatus],
        values: Mapping[str, Any],
        events: Sequence[NewEvent] = (),
        result_file: FileRecord | None = None,
    ) -> JobRecord | None:
        """Set columns, add events and insert the row of ``result_file``, all or nothing, if the job has one of the
        ``allowed`` statuses; then return it as it is now. Otherwise change nothing and return None.

        A status that ends the job sets ``finished_at``; any but running clears ``pending`` and ``estimated_finish``.
        """

        def work(connection: Connection) -> JobRecord | None:
            changed = connection.execute(
                update(schema.jobs).where(_COLUMNS.id == job_id, _COLUMNS.status.in_(allowed)).values(_encoded(values))
            )
            if changed.rowcount == 0:
                return None
            if result_file is not None:
                insert_file(connection, result_file)
            insert_events(connection, job_id, events)
            return self._get(connection, job_id)

        changed = self._database.write(work)
        if changed is not None and values.get("status") in FINISHED:
            code = "" if changed.error is None else changed.error.code
            with self._counting:
                self._ends[changed.status, code] += 1
        return changed

    def fail(
        self, job_id: str, allowed: Collection[JobStatus], error: JobError, message: str | None = None
    ) -> JobRecord | None:
        """Like ``change``: end the job with an error and an event, which says ``message``; None: as the error."""
        values = {"status": JobStatus.FAILED, "error": error}
        return self.change(job_id, allowed, values, [NewEvent(message or error.message, level="error")])

    def take_up(self, job_id: str, events: Sequence[NewEvent]) -> JobRecord | None:
        """Like ``change``: a failed job has not ended any more. It is queued or, if its files were not validated yet,
        that is done again. Raises InvalidInputError if it has to be and one of its files is gone."""

        def work(connection: Connection) -> JobRecord | None:
            job = self._get(connection, job_id)
            if job.status is not JobStatus.FAILED:
                return None
            if job.hyperparameters is None:
                _require_files(connection, job)
            status = JobStatus.VALIDATING if job.hyperparameters is None else JobStatus.QUEUED
            values = _encoded({"status": status, "error": None, "finished_at": None})
            connection.execute(update(schema.jobs).where(_COLUMNS.id == job_id).values(values))
            insert_events(connection, job_id, events)
            return self._get(connection, job_id)

        return self._database.write(work)

    def succeed(
        self,
        job_id: str,
        *,
        adapter_path: str,
        trained_tokens: int,
        total_steps: int,
        result_file: FileRecord | None,
        events: Sequence[NewEvent],
    ) -> JobRecord | None:
        """Like ``change``: from running to succeeded. From here on the adapter is served."""
        values = {
            "status": JobStatus.SUCCEEDED,
            "adapter_path": relative_path(self._data_folder, adapter_path),
            "trained_tokens": trained_tokens,
            "total_steps": total_steps,
            "result_file": result_file.id if result_file else None,
        }
        return self.change(job_id, [JobStatus.RUNNING], values, events, result_file)

    def _get(self, connection: Connection, job_id: str) -> JobRecord:
        job = self._one(connection, select(schema.jobs).where(_COLUMNS.id == job_id))
        if job is None:
            raise NotFoundError(
                f"Could not find fine tune: {job_id[:100]}", code="fine_tune_not_found", param="fine_tuning_job_id"
            )
        return job

    def _one(self, connection: Connection, query: Select[Any]) -> JobRecord | None:
        row = connection.execute(query).one_or_none()
        return None if row is None else self._job_of(row)

    def _job_of(self, row: Row[Any]) -> JobRecord:
        fields = dict(row._mapping)
        del fields["sequence"]
        for name in ("metadata", "requested"):
            fields[name] = None if fields[name] is None else msgspec.json.decode(fields[name])
        if fields["hyperparameters"] is not None:
            fields["hyperparameters"] = msgspec.json.decode(fields["hyperparameters"], type=Hyperparameters)
        if fields["error"] is not None:
            fields["error"] = msgspec.json.decode(fields["error"], type=JobError)
        if fields["adapter_path"] is not None:
            fields["adapter_path"] = str(self._data_folder / fields["adapter_path"])
        fields["status"] = JobStatus(fields["status"])
        fields["pending"] = None if fields["pending"] is None else Pending(fields["pending"])
        return JobRecord(**fields)


def _require_files(connection: Connection, job: NewJob | JobRecord) -> None:
    """No deletion can come between this and the job's row, because both are in one transaction."""
    for param, file_id in (("training_file", job.training_file), ("validation_file", job.validation_file)):
        if file_id is not None and connection.execute(_file_id(file_id)).one_or_none() is None:
            raise missing_file(param, file_id)


def _file_id(file_id: str) -> Select[Any]:
    return select(schema.files.c.id).where(schema.files.c.id == file_id)


def _is_of_another(base_fingerprint: str) -> ColumnElement[bool]:
    """Of jobs that say which base model is theirs; those from before that was recorded belong to any."""
    return func.coalesce(_COLUMNS.base_fingerprint, base_fingerprint) != base_fingerprint


def _encoded(values: Mapping[str, Any]) -> dict[str, Any]:
    encoded = dict(values)
    status = encoded.get("status")
    if status is not None and status is not JobStatus.RUNNING:
        encoded.setdefault("pending", None)
        encoded["estimated_finish"] = None
    if status in (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED):
        encoded["finished_at"] = _now()
    for name in ("hyperparameters", "error"):
        if name in encoded:
            encoded[name] = _json(encoded[name])
    return encoded


def _json(value: Any) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()


def _now() -> int:
    return int(time.time())
