"""Jobs that have failed for what can be mended from outside are resumed; others are not."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from api_jobs.support import (
    JOBS,
    RecordingWorker,
    Server,
    die,
    die_and_start_again,
    examples,
    metrics,
    queue_of,
    report,
    run,
    server,
    success,
    write_adapter,
)
from cotenant.api.jobs import manager
from cotenant.core.errors import InvalidInputError
from cotenant.store import JobError, JobStatus
from cotenant.wire.messages import CheckpointSaved, JobFailed, JobPaused, JobStarted, StartJob

pytestmark = pytest.mark.usefixtures("_validation_in_a_thread")

FULL = "The disk is full. Free some space."


async def failed_job(there: Server, code: str = "disk_full", message: str = FULL, *steps: int) -> str:
    """A job that has reported four steps and then failed, with whole checkpoints at ``steps``."""
    job_id = await there.started_job()
    for step in steps:
        write_checkpoint(there, job_id, step)
    await there.say(report(job_id, 1, 2, 3, 4), JobFailed(job_id, code, message, 4))
    return job_id


def write_checkpoint(there: Server, job_id: str, step: int, *, is_resumable: bool = True) -> str:
    """A checkpoint as the worker leaves it: with the trainer's state, or one that stays to be served."""
    folder = Path(write_adapter(there.store, job_id, "checkpoints", f"step-{step:08d}"))
    (folder / "trainer_state.json").write_bytes(msgspec.json.encode({"step": step, "metrics": metrics(step)[0]}))
    if is_resumable:
        (folder / "trainer_state.safetensors").write_bytes(b"")
    return str(folder)


async def refused(there: Server, job_id: str) -> str:
    answer = await there.http.post(f"{JOBS}/{job_id}/resume")
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_job_status")
    return str(error["message"])


def test_a_failed_job_goes_on_in_its_turn_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            failed = await failed_job(there, "disk_full", FULL, 2, 3)
            job = await there.job(failed)
            assert (job["status"], job["error"]["code"]) == ("failed", "disk_full")
            said = f"{FULL} Once that is mended, resume the job: it goes on from step 3."
            assert job["error"]["message"] == (await there.messages(failed))[-1] == said
            assert job["finished_at"] is not None
            assert there.store.is_promised(there.store.jobs.get(failed).adapter_name), "others may not take its name"
            running, later = await queue_of(there, 2)
            with monkeypatch.context() as patch:
                disk = os.statvfs(tmp_path)
                full = SimpleNamespace(f_blocks=disk.f_blocks, f_frsize=disk.f_frsize, f_bavail=8)
                patch.setattr(os, "statvfs", lambda path: full)
                answer = await there.http.post(f"{JOBS}/{failed}/resume")
                assert (answer.status_code, answer.json()["error"]["code"]) == (500, "disk_full"), "it still is"
            assert (await there.job(failed))["error"]["message"] == said

        async with server(tmp_path) as there:
            await there.wait_started(running)
            resumed = await there.post(failed, "resume")
            assert (resumed["status"], resumed["error"], resumed["finished_at"]) == ("queued", None, None)
            assert "has status 'queued'" in await refused(there, failed)
            assert (await there.http.delete(f"{JOBS}/{failed}")).status_code == 409
            assert there.worker.started == [running]
            await there.say(success(there, running))
            await there.wait_started(running, failed)
            assert (await there.job(later))["status"] == "queued"
            start = there.worker.sent[-1]
            assert isinstance(start, StartJob)
            assert start.spec.recorded_step == 4
            # From its checkpoint it takes a step again that was reported before it failed.
            await there.say(JobStarted(failed, 6, 3, 40.0), report(failed, 4), report(failed, 5, 6))
            await there.say(success(there, failed))
            job = await there.job(failed)
            assert (job["status"], job["error"]) == ("succeeded", None)
            events = await there.events(failed)
            assert [event["data"]["step"] for event in events if event["type"] == "metrics"] == [1, 2, 3, 4, 5, 6]
            assert [event["message"] for event in events if event["message"].startswith("Fine-tuning job")] == [
                "Fine-tuning job started",
                "Fine-tuning job resumed",
                "Fine-tuning job goes on from step 3",
            ]
            await there.wait_started(running, failed, later)

    run(scenario)


@pytest.mark.parametrize(
    "code",
    [
        "disk_full", "io_error", "storage_error", "insufficient_memory", "out_of_memory", "worker_busy",
        "internal_error",
    ],
)  # fmt: skip
def test_what_can_be_mended(tmp_path: Path, code: str) -> None:
    mended = "With more memory for it" if "memory" in code else "Once that is mended"

    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await failed_job(there, code, "RuntimeError: it is broken")
            assert (await there.job(job_id))["error"]["message"] == (
                f"RuntimeError: it is broken. {mended}, resume the job: "
                "it has no checkpoint and begins with the first step."
            )
            assert (await there.post(job_id, "resume"))["status"] in ("queued", "running")
            await there.wait_started(job_id, job_id)

    run(scenario)


@pytest.mark.parametrize("code", ["training_diverged", "invalid_training_file", "checkpoint_mismatch", "invalid_job"])
def test_what_cannot_be_mended(tmp_path: Path, code: str) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await failed_job(there, code, "It does not work.", 2)
            before = await there.job(job_id), await there.messages(job_id)
            assert before[0]["error"]["message"] == "It does not work."
            with pytest.raises(InvalidInputError, match="cannot be resumed"):
                await there.jobs.resume(job_id)
            assert f"it failed with '{code}', which nothing but other data or settings mends" in await refused(
                there, job_id
            )
            assert (await there.job(job_id), await there.messages(job_id)) == before

    run(scenario)


def test_a_job_that_has_succeeded_or_was_cancelled_is_not_resumed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            done, cancelled = await queue_of(there, 2)
            await there.post(cancelled, "cancel")
            await there.say(success(there, done))
            for job_id in (done, cancelled):
                assert "only a paused or failed job can be" in await refused(there, job_id)

    run(scenario)


def test_a_job_that_an_earlier_version_has_failed_is_resumed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await there.started_job()
            write_checkpoint(there, job_id, 4)
            error = JobError("disk_full", "The disk is full. Free some space and create the job again.")
            assert there.store.jobs.fail(job_id, [JobStatus.RUNNING], error)
        async with server(tmp_path) as there:
            said = f"{FULL} Once that is mended, resume the job: it goes on from step 4."
            (listed,) = (await there.http.get(JOBS)).json()["data"]
            assert (await there.job(job_id))["error"]["message"] == listed["error"]["message"] == said
            assert (await there.post(job_id, "resume"))["error"] is None
            await there.wait_started(job_id)

    run(scenario)


def test_a_job_on_which_workers_died_is_given_as_many_once_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await there.started_job()
            for _ in range(2):
                for _ in range(manager.MAX_FRUITLESS_DEATHS - 1):
                    await die_and_start_again(there, job_id)
                await die(there)
                failed = await there.wait(job_id, "failed")
                assert failed["error"]["code"] == "worker_died"
                assert failed["error"]["message"].endswith("it has no checkpoint and begins with the first step.")
                num_starts = len(there.worker.started)
                await there.post(job_id, "resume")
                await there.wait_started(*[job_id] * (num_starts + 1))

    run(scenario)


def test_a_job_fails_again_and_says_from_where_it_would_go_on_by_then(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await failed_job(there, "out_of_memory", "There is no memory.")
            await there.post(job_id, "resume")
            await there.wait_started(job_id, job_id)
            path = write_checkpoint(there, job_id, 5)
            write_checkpoint(there, job_id, 2, is_resumable=False)
            await there.say(JobStarted(job_id, 6, 0, 40.0), report(job_id, 1, 2, 3, 4, 5))
            await there.say(CheckpointSaved(job_id, 5, path, metrics(5)[0]), JobFailed(job_id, "disk_full", FULL, 5))
            error = (await there.job(job_id))["error"]
            assert error["message"] == f"{FULL} Once that is mended, resume the job: it goes on from step 5."
            assert (await there.messages(job_id)).count("Checkpoint created at step 5") == 1
            await there.post(job_id, "resume")
            await there.wait_started(job_id, job_id, job_id)
            assert (await there.post(job_id, "cancel"))["status"] == "cancelled"
            assert (await there.http.delete(f"{JOBS}/{job_id}")).status_code == 200
            assert not there.store.jobs.folder(job_id).exists()

    run(scenario)


def test_a_step_whose_evaluation_was_to_come_has_it_after_all(tmp_path: Path) -> None:
    """It was paused in its evaluation, and ran out of memory there when it was resumed."""

    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await there.started_job()
            await there.say(report(job_id, 1))
            path = write_checkpoint(there, job_id, 2)
            await there.post(job_id, "pause")
            await there.post(job_id, "resume")
            await there.wait_started(job_id, job_id)
            await there.say(JobStarted(job_id, 6, 2, 40.0), JobFailed(job_id, "out_of_memory", "None.", 2))
            (name,) = await there.checkpoints(job_id)
            assert name.endswith(":ckpt-step-2")
            await there.post(job_id, "resume")
            await there.wait_started(job_id, job_id, job_id)
            await there.say(JobStarted(job_id, 6, 2, 40.0), report(job_id, 2, valid=True))
            await there.say(CheckpointSaved(job_id, 2, path, metrics(2, valid=True)[0]))
            *_, figures = [event["data"] for event in await there.events(job_id) if event["type"] == "metrics"]
            assert (figures["step"], figures["valid_loss"]) == (2, 1.5)
            (checkpoint,) = (await there.http.get(f"{JOBS}/{job_id}/checkpoints")).json()["data"]
            assert checkpoint["metrics"]["valid_loss"] == 1.5

    run(scenario)


def test_a_job_whose_files_could_not_be_validated_has_them_validated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with server(tmp_path, RecordingWorker(ready=None)) as there:
            file, other = [await there.upload(examples()) for _ in range(2)]
            first, second = [str((await there.create(training_file=each))["id"]) for each in (file, other)]
            for job_id in (first, second):
                await there.wait(job_id, "queued")
                fail_in_validation(there, job_id)
            await there.http.delete(f"/v1/files/{other}")
            answer = await there.http.post(f"{JOBS}/{second}/resume")
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "file_not_found")
            assert "It was still to be validated; create a new job" in answer.json()["error"]["message"]
            assert (await there.job(second))["status"] == "failed"
            assert (await there.post(first, "resume"))["status"] == "validating_files"
            assert (await there.http.delete(f"/v1/files/{file}")).status_code == 409
            await there.wait(first, "queued")

    run(scenario)


def fail_in_validation(there: Server, job_id: str) -> None:
    """As if it had, for want of a process or of space."""
    error = JobError("validation_failed", "The process that does it could not be started.")
    values: dict[str, Any] = {"status": JobStatus.FAILED, "error": error, "hyperparameters": None}
    assert there.store.jobs.change(job_id, [JobStatus.QUEUED], values)


def test_an_error_says_from_where_the_job_would_go_on_now(tmp_path: Path) -> None:
    """Whoever needs space may delete its checkpoints."""

    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await failed_job(there, "disk_full", FULL, 2, 3)
            names = await there.checkpoints(job_id)
            for name, way_on in zip(
                names, ("it goes on from step 2", "it has no checkpoint and begins with the first step"), strict=True
            ):
                assert (await there.http.delete(f"/v1/models/{name}")).status_code == 200
                message = (await there.job(job_id))["error"]["message"]
                assert message == f"{FULL} Once that is mended, resume the job: {way_on}."
            (there.store.jobs.folder(job_id) / "train.safetensors").unlink()
            assert (await there.job(job_id))["error"]["message"] == FULL, "it cannot go on any more"

    run(scenario)


@pytest.mark.parametrize("gone", ["", "train.safetensors"])
def test_a_job_whose_files_are_gone_is_not_resumed(tmp_path: Path, gone: str) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await failed_job(there)
            folder = there.store.jobs.folder(job_id)
            (folder / gone).rename(tmp_path / "elsewhere")
            assert "its files in the data folder are gone; create a new job" in await refused(there, job_id)

    run(scenario)


def test_a_failed_job_that_was_being_paused_is_resumed_whole(tmp_path: Path) -> None:
    """The worker answers who has asked for the pause behind the failure."""

    async def scenario() -> None:
        async with server(tmp_path, RecordingWorker(obedient=False)) as there:
            job_id = await there.started_job()
            pausing = asyncio.create_task(there.post(job_id, "pause"))
            while len(there.worker.sent) < 2:
                await asyncio.sleep(0.01)
            await there.say(JobFailed(job_id, "disk_full", FULL, 4), JobPaused(job_id, 0))
            assert (await pausing)["status"] == "failed"
            assert (await there.post(job_id, "resume"))["status"] == "queued"
            async with asyncio.timeout(60):
                while there.worker.started != [job_id, job_id]:
                    await asyncio.sleep(0.01)
            assert (await there.job(job_id))["status"] == "running"

    run(scenario)
