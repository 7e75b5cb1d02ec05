"""A job's events and checkpoints. Both may be reported again after a crash, and are then stored once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, delete, exists, func, select, update
from sqlalchemy.dialects.sqlite import insert

from cotenant.store import schema
from cotenant.store.database import Database
from cotenant.store.ids import new_id
from cotenant.store.paging import DeletedPlaces, read_page
from cotenant.store.paths import relative_path
from cotenant.store.records import CheckpointRecord, EventRecord, NewEvent, Page

_EVENTS = schema.events.c
_CHECKPOINTS = schema.checkpoints.c


class EventStore:
    """What happened in jobs, in the order in which it was stored."""

    def __init__(self, folder: Path, database: Database) -> None:
        self._folder = folder
        self._database = database
        self._deleted = DeletedPlaces()  # of checkpoints, by their jobs' ids and their own

    def add(self, job_id: str, events: Sequence[NewEvent]) -> None:
        """Append events of a stored job. Raises StoreError."""
        self._database.write(lambda connection: insert_events(connection, job_id, events))

    def add_metrics(
        self, job_id: str, events: Sequence[NewEvent], trained_tokens: int, estimated_finish: int | None
    ) -> int:
        """Append metrics events, each with its step, and the job's progress, in one transaction.

        Steps that are stored already are left as they are. Returns how many were new. Raises StoreError.
        """

        def work(connection: Connection) -> int:
            num_new = insert_events(connection, job_id, events)
            jobs = schema.jobs.c
            connection.execute(
                update(schema.jobs)
                .where(jobs.id == job_id)
                .values(
                    # After a crash the worker counts from its checkpoint again, up to figures that we had.
                    trained_tokens=func.max(func.coalesce(jobs.trained_tokens, 0), trained_tokens),
                    estimated_finish=estimated_finish,
                )
            )
            return num_new

        return self._database.write(work)

    def page(self, job_id: str, *, after: str | None = None, limit: int = 20) -> Page[EventRecord]:
        """A page of a job's events, newest first. Raises InvalidInputError for an unknown ``after``."""
        owner = _EVENTS.job_id == job_id
        query = select(schema.events).where(owner)
        return self._database.read(
            lambda connection: read_page(
                connection, query, schema.events, _event_of, after=after, limit=limit, owner=owner
            )
        )

    def metrics(self, job_id: str) -> list[dict[str, Any]]:
        """The figures of all steps that are stored, in step order."""
        query = select(_EVENTS.data).where(_EVENTS.job_id == job_id, _EVENTS.step.is_not(None)).order_by(_EVENTS.step)
        rows = self._database.read(lambda connection: connection.execute(query).scalars().all())
        return [msgspec.json.decode(data) for data in rows]

    def has(self, job_id: str, message: str) -> bool:
        """Whether a job has an event that says this."""
        query = select(exists().where(_EVENTS.job_id == job_id, _EVENTS.message == message))
        return bool(self._database.read(lambda connection: connection.execute(query).scalar_one()))

    def recorded_step(self, job_id: str) -> int:
        """The last step up to which all steps are stored; 0 if the first one is missing."""
        query = select(_EVENTS.step).where(_EVENTS.job_id == job_id, _EVENTS.step.is_not(None)).order_by(_EVENTS.step)
        steps = self._database.read(lambda connection: connection.execute(query).scalars().all())
        recorded = 0
        for step in steps:
            if step != recorded + 1:
                break
            recorded = step
        return recorded

    def add_checkpoint(
        self, job_id: str, step: int, name: str, path: str, metrics: Mapping[str, Any] | None, event: NewEvent
    ) -> bool:
        """Store a checkpoint and its event. False if that step's checkpoint is stored already, of which nothing changes
        then but ``metrics`` that were not known.

        ``path`` lies in the data folder. Raises StoreError.
        """
        values = {
            "id": new_id("ftckpt_"),
            "job_id": job_id,
            "created_at": int(time.time()),
            "step": step,
            "name": name,
            "path": relative_path(self._folder, path),
            "metrics": None if metrics is None else msgspec.json.encode(metrics).decode(),
        }

        def work(connection: Connection) -> bool:
            statement = insert(schema.checkpoints).values(values).on_conflict_do_nothing(["job_id", "step"])
            if connection.execute(statement, execution_options={"preserve_rowcount": True}).rowcount == 0:
                of_step = (_CHECKPOINTS.job_id == job_id, _CHECKPOINTS.step == step, _CHECKPOINTS.metrics.is_(None))
                connection.execute(update(schema.checkpoints).where(*of_step).values(metrics=values["metrics"]))
                return False
            insert_events(connection, job_id, [event])
            return True

        return self._database.write(work)

    def remove_checkpoint(self, job_id: str, step: int, event: NewEvent) -> bool:
        """Take a checkpoint off the list, so that it is served no more, and store an event that says so. False, and
        nothing changes, if there is none of that step. Its files stay. Raises StoreError."""
        of_step = delete(schema.checkpoints).where(_CHECKPOINTS.job_id == job_id, _CHECKPOINTS.step == step)
        statement = of_step.returning(_CHECKPOINTS.id)

        def work(connection: Connection) -> bool:
            checkpoint_id = connection.execute(statement).scalar_one_or_none()
            if checkpoint_id is None:
                return False
            self._deleted.add(f"{job_id} {checkpoint_id}", step)
            insert_events(connection, job_id, [event])
            return True

        return self._database.write(work)

    def find_checkpoint(self, name: str) -> CheckpointRecord | None:
        """The checkpoint that is listed as ``name``, whether its files are there or not."""
        query = select(schema.checkpoints).where(_CHECKPOINTS.name == name)
        row = self._database.read(lambda connection: connection.execute(query).one_or_none())
        return None if row is None else self._checkpoint_of(row)

    def last_checkpoint_step(self, job_id: str) -> int | None:
        """The last step of a job that has a checkpoint on the list."""
        query = select(func.max(_CHECKPOINTS.step)).where(_CHECKPOINTS.job_id == job_id)
        step: int | None = self._database.read(lambda connection: connection.execute(query).scalar_one())
        return step

    def checkpoint_paths(self, job_id: str) -> dict[str, str]:
        """The folders of all checkpoints of a job by their names."""
        query = select(_CHECKPOINTS.name, _CHECKPOINTS.path).where(_CHECKPOINTS.job_id == job_id)
        rows = self._database.read(lambda connection: connection.execute(query).all())
        return {row.name: str(self._folder / row.path) for row in rows}

    def missing_checkpoints(self, job_id: str | None = None) -> list[CheckpointRecord]:
        """The checkpoints on the list, of one job or of all, whose folder is gone."""
        query = select(schema.checkpoints)
        if job_id is not None:
            query = query.where(_CHECKPOINTS.job_id == job_id)
        rows = self._database.read(lambda connection: connection.execute(query).all())
        checkpoints = [self._checkpoint_of(row) for row in rows]
        return [checkpoint for checkpoint in checkpoints if not Path(checkpoint.path).is_dir()]

    def checkpoint_page(self, job_id: str, *, after: str | None = None, limit: int = 10) -> Page[CheckpointRecord]:
        """A page of a job's checkpoints, the last step's first. Raises InvalidInputError for an unknown ``after``."""
        # Not by when they were stored: a job that ends lists earlier steps of which nothing was said while it ran.
        owner = _CHECKPOINTS.job_id == job_id
        query = select(schema.checkpoints).where(owner)
        return self._database.read(
            lambda connection: read_page(
                connection,
                query,
                schema.checkpoints,
                self._checkpoint_of,
                after=after,
                limit=limit,
                deleted=lambda checkpoint_id: self._deleted.find(f"{job_id} {checkpoint_id}"),
                owner=owner,
                place=_CHECKPOINTS.step,
            )
        )

    def _checkpoint_of(self, row: Row[Any]) -> CheckpointRecord:
        metrics = None if row.metrics is None else msgspec.json.decode(row.metrics)
        path = str(self._folder / row.path)
        return CheckpointRecord(row.id, row.job_id, row.created_at, row.step, row.name, path, metrics)


def insert_events(connection: Connection, job_id: str, events: Sequence[NewEvent]) -> int:
    """Insert events as part of a larger transaction, except steps that are stored already. Returns how many."""
    if not events:
        return 0
    now = int(time.time())
    rows = [
        {
            "id": new_id("ftevent-"),
            "job_id": job_id,
            "created_at": now,
            "level": event.level,
            "type": event.type,
            "message": event.message,
            "step": event.step,
            "data": None if event.data is None else msgspec.json.encode(event.data).decode(),
        }
        for event in events
    ]
    statement = insert(schema.events).on_conflict_do_nothing(["job_id", "step"])
    return connection.execute(statement, rows, execution_options={"preserve_rowcount": True}).rowcount


def _event_of(row: Row[Any]) -> EventRecord:
    data = None if row.data is None else msgspec.json.decode(row.data)
    return EventRecord(row.id, row.job_id, row.created_at, row.level, row.type, row.message, data)
