"""The adapters that requests may name: those of jobs that succeeded, and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Row, Select, exists, literal_column, select, union_all

from cotenant.core.job import Hyperparameters
from cotenant.store import schema
from cotenant.store.database import Database
from cotenant.store.records import UNFINISHED, JobStatus, ServedAdapter

# Adapter folders appear in one rename, so where this file is the others are too.
_ADAPTER_FILE = "adapter_config.json"
_CHECKPOINT = ":ckpt-step-"


def checkpoint_name(adapter_name: str, step: int) -> str:
    """What the checkpoint of this step is called, of the job whose result has the name ``adapter_name``."""
    return f"{adapter_name}{_CHECKPOINT}{step}"


class AdapterCatalog:
    """Reads the adapters off the jobs and checkpoints, of all base models and ranks. An adapter whose folder is gone is
    not served."""

    def __init__(self, folder: Path, database: Database) -> None:
        self._folder = folder
        self._database = database

    def all(self) -> list[ServedAdapter]:
        """Oldest job first, its checkpoints in step order and then its result."""
        query = union_all(_results(), _checkpoints())
        rows = self._database.read(lambda connection: connection.execute(query.order_by("job_sequence", "step")).all())
        adapters = [self._adapter(row) for row in rows]
        return [adapter for adapter in adapters if adapter is not None]

    def find(self, name: str) -> ServedAdapter | None:
        """The adapter that is served under ``name``."""
        results = _results().where(schema.jobs.c.adapter_name == name)
        checkpoints = _checkpoints().where(schema.checkpoints.c.name == name)
        row = self._database.read(lambda connection: connection.execute(union_all(results, checkpoints)).first())
        return None if row is None else self._adapter(row)

    def is_promised(self, name: str) -> bool:
        """Whether a job that has not ended, or may be resumed, may have this name for its result or a checkpoint."""
        jobs = schema.jobs.c
        may_go_on = jobs.status.in_((*UNFINISHED, JobStatus.FAILED))
        query = select(exists().where(jobs.adapter_name.in_(_results_of(name)), may_go_on))
        return bool(self._database.read(lambda connection: connection.execute(query).scalar_one()))

    def owner(self, name: str) -> str | None:
        """The job one of whose models is served under this name, or may come to be; None: there is none."""
        if self.find(name) is None and not self.is_promised(name):
            return None
        query = select(schema.jobs.c.id).where(schema.jobs.c.adapter_name.in_(_results_of(name)))
        owner: str | None = self._database.read(lambda connection: connection.execute(query).scalar())
        return owner

    def _adapter(self, row: Row[Any]) -> ServedAdapter | None:
        folder = self._folder / row.path
        if not (folder / _ADAPTER_FILE).is_file():
            return None
        rank = msgspec.json.decode(row.hyperparameters, type=Hyperparameters).max_rank
        return ServedAdapter(
            row.name, str(folder), rank, row.parent, row.base_root, row.base_fingerprint, row.created_at
        )


def _results_of(name: str) -> tuple[str, str]:
    """What the result is called of a job that has ``name`` for its result or a checkpoint."""
    return name, name.rpartition(_CHECKPOINT)[0]


def _results() -> Select[Any]:
    jobs = schema.jobs.c
    return select(
        jobs.sequence.label("job_sequence"),
        literal_column("9223372036854775807").label("step"),
        jobs.adapter_name.label("name"),
        jobs.adapter_path.label("path"),
        jobs.hyperparameters,
        jobs.model.label("parent"),
        jobs.base_root,
        jobs.base_fingerprint,
        jobs.finished_at.label("created_at"),
    ).where(jobs.status == JobStatus.SUCCEEDED)


def _checkpoints() -> Select[Any]:
    jobs, checkpoints = schema.jobs.c, schema.checkpoints.c
    return select(
        jobs.sequence,
        checkpoints.step,
        checkpoints.name,
        checkpoints.path,
        jobs.hyperparameters,
        jobs.model,
        jobs.base_root,
        jobs.base_fingerprint,
        checkpoints.created_at,
    ).join_from(schema.checkpoints, schema.jobs, checkpoints.job_id == jobs.id)
