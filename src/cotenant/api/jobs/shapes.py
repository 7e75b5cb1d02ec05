"""What clients see of a job, its events and its checkpoints: OpenAI's objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cotenant.api.jobs.hyperparameters import AUTO, as_requested
from cotenant.core.job import SUPERVISED
from cotenant.store import CheckpointRecord, EventRecord, JobRecord, JobStatus, Page

_CHECKPOINT_METRICS = (
    "step",
    "train_loss",
    "train_mean_token_accuracy",
    "valid_loss",
    "valid_mean_token_accuracy",
    "full_valid_loss",
    "full_valid_mean_token_accuracy",
)
_OPENAI_HYPERPARAMETERS = ("n_epochs", "batch_size", "learning_rate_multiplier")


class JobErrorObject(msgspec.Struct):
    """Why a job failed."""

    code: str
    message: str
    param: str | None


class Job(msgspec.Struct, kw_only=True):
    """A fine-tuning job. Hyperparameters are 'auto' until the files are validated."""

    id: str
    object: str = "fine_tuning.job"
    created_at: int
    finished_at: int | None
    estimated_finish: int | None
    status: str
    model: str
    fine_tuned_model: str | None
    user_provided_suffix: str | None
    organization_id: str
    training_file: str
    validation_file: str | None
    result_files: list[str]
    trained_tokens: int | None
    seed: int
    error: JobErrorObject | None
    hyperparameters: dict[str, Any]
    method: dict[str, Any]
    metadata: dict[str, str] | None
    integrations: list[str] = msgspec.field(default_factory=list)


class Event(msgspec.Struct, kw_only=True):
    """Something that happened in a job. ``data`` of a metrics event: the step's figures."""

    id: str
    object: str = "fine_tuning.job.event"
    created_at: int
    level: str
    message: str
    type: str
    data: dict[str, Any]


class Checkpoint(msgspec.Struct, kw_only=True):
    """A checkpoint, which is served as a model of its own."""

    id: str
    object: str = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuning_job_id: str
    fine_tuned_model_checkpoint: str
    step_number: int
    metrics: dict[str, Any]


class JobDeleted(msgspec.Struct, kw_only=True):
    """A job that is gone."""

    id: str
    object: str = "fine_tuning.job"
    deleted: bool = True


class JobList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[Job]
    has_more: bool


class EventList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[Event]
    has_more: bool


class CheckpointList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[Checkpoint]
    first_id: str | None
    last_id: str | None
    has_more: bool


def job_of(record: JobRecord, organization: str) -> Job:
    """A stored job as clients see it."""
    method = record.requested.get("method", SUPERVISED)
    requested = {name: value for name, value in record.requested.items() if name not in ("seed", "method")}
    settings = requested if record.hyperparameters is None else as_requested(record.hyperparameters)
    error = record.error
    return Job(
        id=record.id,
        created_at=record.created_at,
        finished_at=record.finished_at,
        estimated_finish=record.estimated_finish,
        status=record.status,
        model=record.model,
        fine_tuned_model=record.adapter_name if record.status is JobStatus.SUCCEEDED else None,
        user_provided_suffix=record.suffix,
        organization_id=organization,
        training_file=record.training_file,
        validation_file=record.validation_file,
        result_files=[] if record.result_file is None else [record.result_file],
        trained_tokens=record.trained_tokens,
        seed=record.requested["seed"],
        error=None if error is None else JobErrorObject(error.code, error.message, error.param),
        hyperparameters={name: settings.get(name, AUTO) for name in _OPENAI_HYPERPARAMETERS},
        method={"type": method, method: {"hyperparameters": settings}},
        metadata=record.metadata,
    )


def job_list(page: Page[JobRecord], organization: str) -> JobList:
    return JobList(data=[job_of(record, organization) for record in page.items], has_more=page.has_more)


def event_list(page: Page[EventRecord]) -> EventList:
    events = [
        Event(
            id=record.id,
            created_at=record.created_at,
            level=record.level,
            message=record.message,
            type=record.type,
            data=record.data or {},
        )
        for record in page.items
    ]
    return EventList(data=events, has_more=page.has_more)


def checkpoint_list(page: Page[CheckpointRecord]) -> CheckpointList:
    checkpoints = [
        Checkpoint(
            id=record.id,
            created_at=record.created_at,
            fine_tuning_job_id=record.job_id,
            fine_tuned_model_checkpoint=record.name,
            step_number=record.step,
            metrics=_checkpoint_metrics(record.metrics or {}),
        )
        for record in page.items
    ]
    first, last = _ends([checkpoint.id for checkpoint in checkpoints])
    return CheckpointList(data=checkpoints, first_id=first, last_id=last, has_more=page.has_more)


def _checkpoint_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's figures, measured or not, and TRL's of preferences where the job has them."""
    preference = {name: value for name, value in metrics.items() if "/" in name}
    return {name: metrics.get(name) for name in _CHECKPOINT_METRICS} | preference


def _ends(ids: Sequence[str]) -> tuple[str | None, str | None]:
    return (ids[0], ids[-1]) if ids else (None, None)
