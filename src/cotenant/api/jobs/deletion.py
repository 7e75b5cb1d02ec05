"""Deleting what jobs have made, to free disk space. Files go first, in one rename: what a crash leaves half deleted is
in no list after the next start, and is not served."""

from __future__ import annotations

from pathlib import Path

from cotenant.api.jobs import events
from cotenant.api.jobs.failures import is_mendable
from cotenant.api.models import unknown_model
from cotenant.core.errors import ConflictError
from cotenant.durable import remove_folder
from cotenant.store import CheckpointRecord, JobRecord, Pending, Store
from cotenant.store.errors import store_error


def delete_model(store: Store, name: str) -> str:
    """Delete the result or the checkpoint of a job that is served as ``name``, and return the folder that held it. The
    job's record stays.

    Raises NotFoundError, ConflictError for a checkpoint that its job still needs, StoreError.
    """
    checkpoint = store.events.find_checkpoint(name)
    job = store.jobs.find_succeeded(name) if checkpoint is None else store.jobs.get(checkpoint.job_id)
    if job is None:
        raise unknown_model(name)
    if checkpoint is not None:
        _check_not_needed(store, job, checkpoint)
        folder = Path(checkpoint.path)
        _remove(folder)
        store.events.remove_checkpoint(job.id, checkpoint.step, events.checkpoint_deleted(checkpoint.step))
    else:
        folder = Path(job.adapter_path or "")
        if not folder.is_dir():
            raise unknown_model(name)
        _remove(folder)
        store.events.add(job.id, [events.model_deleted(name)])
    store.files.restore_ballast()
    return str(folder)


def delete_job(store: Store, job: JobRecord) -> dict[str, str]:
    """Delete an ended job: its record, events, tokenised examples and models. Returns the folders of these by the names
    that they may have been served by. Raises ConflictError for a job that has not ended, StoreError."""
    if not job.finished:
        way_out = {
            None: ". Cancel it or wait until it has ended",
            Pending.PAUSE: ": it is being paused. Cancel it or wait until it has ended",
            Pending.CANCEL: ": it is being cancelled. Wait until it has ended",
        }[job.pending]
        raise ConflictError(
            f"Job '{job.id}' has status '{job.status}' and cannot be deleted{way_out}.",
            code="job_in_use",
            param="fine_tuning_job_id",
        )
    result = {} if job.adapter_path is None else {job.adapter_name: job.adapter_path}
    paths = result | store.events.checkpoint_paths(job.id)
    _remove(store.jobs.folder(job.id))
    store.jobs.delete(job.id)
    store.files.restore_ballast()
    return paths


def forget_missing_checkpoints(store: Store, job_id: str | None = None) -> None:
    """Take checkpoints off the list, of one job or of all, whose files were deleted without the list's being told."""
    for checkpoint in store.events.missing_checkpoints(job_id):
        event = events.checkpoint_deleted(checkpoint.step)
        store.events.remove_checkpoint(checkpoint.job_id, checkpoint.step, event)


def _check_not_needed(store: Store, job: JobRecord, checkpoint: CheckpointRecord) -> None:
    """The newest checkpoint is what a job that has not ended goes on from, and the best one what becomes its result;
    this one also where it has failed and may be resumed. (From which step it goes on is its owner's choice then.)"""
    may_go_on = job.error is not None and is_mendable(job.error)
    if job.finished and not may_go_on:
        return
    way_out = "Cancel the job or wait until it has ended"
    if may_go_on:
        way_out = "Resume the job, or delete it with all its models"
    if not may_go_on and checkpoint.step == store.events.last_checkpoint_step(job.id):
        reason = "is the newest one, from which the job goes on after a restart"
    elif job.hyperparameters is not None and job.hyperparameters.load_best_model_at_end:
        reason = "may be the best one, which becomes the job's result (load_best_model_at_end)"
    else:
        return
    raise ConflictError(
        f"The model '{checkpoint.name}' cannot be deleted: job '{job.id}' is {job.status}, and this checkpoint "
        f"{reason}. {way_out}.",
        code="model_in_use",
        param="model",
    )


def _remove(folder: Path) -> None:
    try:
        remove_folder(folder)
    except OSError as error:
        raise store_error(error) from error
