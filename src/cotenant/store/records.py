"""What the store hands out and takes in: plain values, detached from the database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from cotenant.core.job import Hyperparameters

T = TypeVar("T")


class JobStatus(StrEnum):
    """A job's status in OpenAI's words."""

    VALIDATING = "validating_files"
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


UNFINISHED = (JobStatus.VALIDATING, JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.PAUSED)
FINISHED = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED)


class Pending(StrEnum):
    """What a client has asked of a running job and the worker has not confirmed yet."""

    PAUSE = "pause"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a list."""

    items: list[T]
    has_more: bool


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A stored file. ``filename`` is what the client called it and is used for nothing."""

    id: str
    created_at: int
    filename: str
    purpose: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class JobError:
    """Why a job failed."""

    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job that is about to be stored. ``requested``: hyperparameters as the client gave them, 'auto' included.

    ``model`` is the base model's served name, ``base_root`` the folder or hub id that adapters refer to it by, and
    ``base_fingerprint`` its identity.
    """

    id: str
    model: str
    base_root: str
    base_fingerprint: str
    training_file: str
    validation_file: str | None
    suffix: str | None
    adapter_name: str
    requested: Mapping[str, Any]
    metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A stored job. ``hyperparameters`` is None until the files are validated; ``adapter_path`` is absolute;
    ``base_fingerprint`` None: whatever model is served."""

    id: str
    created_at: int
    started_at: int | None
    finished_at: int | None
    status: JobStatus
    pending: Pending | None
    model: str
    base_root: str
    base_fingerprint: str | None
    training_file: str
    validation_file: str | None
    suffix: str | None
    metadata: dict[str, str] | None
    requested: dict[str, Any]
    hyperparameters: Hyperparameters | None
    adapter_name: str
    adapter_path: str | None
    error: JobError | None
    trained_tokens: int | None
    total_steps: int | None
    estimated_finish: int | None
    result_file: str | None

    @property
    def finished(self) -> bool:
        return self.status in FINISHED


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event that is about to be stored. ``step`` is set on metrics events: one is kept per job and step."""

    message: str
    level: str = "info"
    type: str = "message"
    data: Mapping[str, Any] | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True)
class EventRecord:
    """A stored event."""

    id: str
    job_id: str
    created_at: int
    level: str
    type: str
    message: str
    data: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A checkpoint that the worker announced. ``path`` is absolute."""

    id: str
    job_id: str
    created_at: int
    step: int
    name: str
    path: str
    metrics: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """A trained adapter that requests may name. ``path``: its folder in PEFT's format; ``rank``: what --max-lora-rank
    has to be at least; ``parent``: the base model, of which ``base_root`` and ``base_fingerprint`` are as in JobRecord.
    """

    name: str
    path: str
    rank: int
    parent: str
    base_root: str
    base_fingerprint: str | None
    created_at: int
