"""Files and jobs for tests of the store."""

from __future__ import annotations

from collections.abc import Mapping

from cotenant.core.job import Hyperparameters
from cotenant.store import FileRecord, JobRecord, JobStatus, NewEvent, NewJob, Store
from cotenant.store.ids import new_id, short_id

CONTENT = b'{"messages": []}\n'


def add_file(store: Store, content: bytes = CONTENT, purpose: str = "fine-tune") -> FileRecord:
    upload = store.files.begin_upload(1 << 26)
    try:
        upload.write(content)
        return upload.finish("examples.jsonl", purpose)
    finally:
        upload.discard()


def add_job(
    store: Store,
    file: FileRecord | None = None,
    metadata: Mapping[str, str] | None = None,
    *,
    validation: str | None = None,
) -> JobRecord:
    """A job as it is when it has just been created."""
    job_id = new_id("ftjob-")
    job = NewJob(
        id=job_id,
        model="tiny",
        base_root="/models/tiny",
        base_fingerprint="base",
        training_file=(file or add_file(store)).id,
        validation_file=validation,
        suffix=None,
        adapter_name=f"ft:tiny:local::{short_id(job_id)}",
        requested={"n_epochs": "auto", "seed": 1},
        metadata=metadata,
    )
    return store.jobs.create(job, [NewEvent(f"Created fine-tuning job: {job_id}")])


def add_running_job(store: Store) -> JobRecord:
    job = add_job(store)
    values = {"status": JobStatus.RUNNING, "hyperparameters": Hyperparameters()}
    running = store.jobs.change(job.id, [JobStatus.VALIDATING], values)
    assert running is not None
    return running


def metrics_event(step: int, loss: float = 1.0) -> NewEvent:
    return NewEvent(f"Step {step}", type="metrics", data={"step": step, "train_loss": loss}, step=step)


def make_adapter(store: Store, job: JobRecord, *parts: str) -> str:
    """A folder below the job's that looks like an adapter."""
    folder = store.jobs.make_folder(job.id).joinpath(*parts)
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    return str(folder)
