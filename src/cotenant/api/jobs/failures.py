"""Jobs that have failed for what can be mended from outside: what their owner is told, and whether they can go on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cotenant.api.jobs.job_folder import TRAINING_EXAMPLES, VALIDATION_EXAMPLES, resumable_step
from cotenant.store import JobError, JobRecord, StoreError

# What mends them, whatever the job's data and settings are.
_MEMORY, _ANY = "With more memory for it", "Once that is mended"
MENDABLE = {
    "disk_full": _ANY,
    "io_error": _ANY,
    "storage_error": _ANY,
    "insufficient_memory": _MEMORY,
    "out_of_memory": _MEMORY,
    "worker_died": _ANY,
    "worker_busy": _ANY,
    "validation_failed": _ANY,
    "internal_error": _ANY,
}
# What else errors say is to be done, as those of earlier versions do; resuming the job is instead of it.
_OTHER_WAYS = (
    "; its last checkpoint is kept",
    " Its last checkpoint is kept.",
    ", then create the job again",
    " and create the job again",
    " and try again",
)


def is_mendable(error: JobError) -> bool:
    """Whether a job may be resumed that has failed with this."""
    return error.code in MENDABLE


def with_way_on(error: JobError, job: JobRecord, folder: Path) -> JobError:
    """The same, with what the job would do if it were resumed now, where it may be. ``folder``: the job's."""
    if why_not_resumable(job, folder, error) is not None:
        return error
    message = error.message
    for words in _OTHER_WAYS:
        message = message.replace(words, "")
    end = "" if message.endswith(".") else "."
    way_on = f"{MENDABLE[error.code]}, resume the job: {_way_on(job, folder)}."
    return replace(error, message=f"{message}{end} {way_on}")


def as_shown(job: JobRecord, folder: Path) -> JobRecord:
    """As clients see it: an error is kept without the way on, which checkpoints that are deleted may change. Reads the
    job's folder."""
    return job if job.error is None else replace(job, error=with_way_on(job.error, job, folder))


def _way_on(job: JobRecord, folder: Path) -> str:
    if job.hyperparameters is None:
        return "its files are validated again"
    try:
        step = resumable_step(folder)
    except StoreError:
        return "it goes on from its last checkpoint"
    return f"it goes on from step {step}" if step else "it has no checkpoint and begins with the first step"


def why_not_resumable(job: JobRecord, folder: Path, error: JobError) -> str | None:
    """Why a job that has failed with this cannot be resumed; None if it can. ``folder``: the job's."""
    if not is_mendable(error):
        return f"it failed with '{error.code}', which nothing but other data or settings mends; create a new job"
    needed = [folder]
    if job.hyperparameters is not None:
        needed.append(folder / TRAINING_EXAMPLES)
        needed += [] if job.validation_file is None else [folder / VALIDATION_EXAMPLES]
    if not all(path.exists() for path in needed):
        return "its files in the data folder are gone; create a new job"
    return None
