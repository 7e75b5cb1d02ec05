"""Models, checkpoints and jobs are deleted to free disk space, whatever happens between."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from api_jobs.support import JOBS, Server, examples, queue_of, run, server, success, write_adapter
from cotenant import durable
from cotenant.api.jobs import validator
from cotenant.api.jobs.prepare_main import Task
from cotenant.store import JobRecord, JobStatus, StoreError
from cotenant.store.events import EventStore
from cotenant.store.jobs import JobStore
from cotenant.text.prepared_file import PreparedFile
from cotenant.wire.messages import CheckpointSaved, JobFailed, UnloadAdapter

pytestmark = pytest.mark.usefixtures("_validation_in_a_thread")


async def with_checkpoints(there: Server, *steps: int, **fields: Any) -> str:
    """A running job with checkpoints at these steps."""
    job_id = await there.started_job(**fields)
    for step in steps:
        path = write_adapter(there.store, job_id, "checkpoints", f"step-{step:08d}")
        await there.say(CheckpointSaved(job_id, step, path, None))
    return job_id


async def delete(there: Server, name: str) -> httpx.Response:
    return await there.http.delete(f"/v1/models/{name}")


def unloaded(there: Server) -> list[str]:
    return [message.name for message in there.worker.sent if isinstance(message, UnloadAdapter)]


def folders(there: Server, job_id: str) -> list[str]:
    folder = there.store.jobs.folder(job_id)
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_dir())


def test_a_result_and_a_checkpoint_are_deleted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await with_checkpoints(there, 3, 6)
            await there.say(success(there, job_id))
            result = (await there.job(job_id))["fine_tuned_model"]
            newest, oldest = await there.checkpoints(job_id)
            for name in (result, newest):
                answer = await delete(there, name)
                assert answer.json() == {"id": name, "object": "model", "deleted": True}
                again = await delete(there, name)
                assert (again.status_code, again.json()["error"]["code"]) == (404, "model_not_found")
                assert (await there.http.get(f"/v1/models/{name}")).status_code == 404
            assert unloaded(there) == [result, newest]
        async with server(tmp_path) as there:
            assert await there.models() == ["tiny", oldest]
            assert await there.checkpoints(job_id) == [oldest]
            assert folders(there, job_id) == ["checkpoints", "checkpoints/step-00000003"]
            job = await there.job(job_id)
            assert (job["status"], job["fine_tuned_model"]) == ("succeeded", result)
            assert (await there.messages(job_id))[-2:] == [
                f"The model {result} was deleted",
                "The checkpoint of step 6 was deleted",
            ]

    run(scenario)


def test_a_job_that_has_not_ended_keeps_what_it_goes_on_from(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await with_checkpoints(there, 3, 6)
            newest, oldest = await there.checkpoints(job_id)
            for _ in ("running", "paused"):
                refused = await delete(there, newest)
                assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_in_use")
                assert "Cancel the job or wait" in refused.json()["error"]["message"]
                await there.post(job_id, "pause")
            assert (await delete(there, oldest)).status_code == 200
            # The worker says again what it said before it died; what it cannot know of is not listed anew.
            await there.say(CheckpointSaved(job_id, 3, str(there.store.jobs.folder(job_id) / "gone"), None))
            assert await there.checkpoints(job_id) == [newest]
            await there.post(job_id, "cancel")
            assert (await delete(there, newest)).status_code == 200
            assert await there.models() == ["tiny"]

    run(scenario)


def test_a_job_that_will_choose_its_best_checkpoint_keeps_all_until_it_has_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            validation = await there.upload(examples())
            method = {"type": "supervised", "supervised": {"hyperparameters": {"load_best_model_at_end": True}}}
            job_id = await with_checkpoints(there, 3, 6, validation_file=validation, method=method)
            refused = await delete(there, (await there.checkpoints(job_id))[1])
            assert refused.status_code == 409
            assert "load_best_model_at_end" in refused.json()["error"]["message"]
            await there.say(success(there, job_id))
            assert (await delete(there, (await there.checkpoints(job_id))[1])).status_code == 200

    run(scenario)


@pytest.mark.parametrize(("code", "chooses", "status_code"), [
    ("disk_full", True, 409), ("disk_full", False, 200), ("training_diverged", True, 200),
])  # fmt: skip
def test_a_failed_job_that_may_go_on_keeps_what_may_become_its_result(
    tmp_path: Path, code: str, chooses: bool, status_code: int
) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            validation = await there.upload(examples())
            method = {"type": "supervised", "supervised": {"hyperparameters": {"load_best_model_at_end": chooses}}}
            job_id = await with_checkpoints(there, 3, 6, validation_file=validation, method=method)
            await there.say(JobFailed(job_id, code, "It does not go on.", 6))
            answers = [await delete(there, name) for name in await there.checkpoints(job_id)]
            assert [answer.status_code for answer in answers] == [status_code] * 2
            if status_code == 409:
                assert "Resume the job, or delete it with all its models." in answers[0].json()["error"]["message"]
            assert (await there.http.delete(f"{JOBS}/{job_id}")).status_code == 200

    run(scenario)


@pytest.mark.parametrize("name", ["ft:tiny:acme::none", "ft:tiny:acme::none:ckpt-step-1", "a/b", "..", "%2e%2e%2fjobs"])
def test_unknown_models_are_not_found(tmp_path: Path, name: str) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            answer = await delete(there, name)
            assert answer.status_code in (404, 405)  # 405: the path is that of the list

    run(scenario)


def test_the_base_model_cannot_be_deleted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            error = (await delete(there, "tiny")).json()["error"]
            assert (error["code"], error["param"]) == ("model_not_deletable", "model")
            assert "base model" in error["message"]

    run(scenario)


def no_room(*_: object, **__: object) -> None:
    raise StoreError("The disk is full.", code="disk_full")


def test_what_is_deleted_while_a_crash_comes_is_neither_listed_nor_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await with_checkpoints(there, 3, 6)
            newest, oldest = await there.checkpoints(job_id)
            with monkeypatch.context() as patch:
                patch.setattr(EventStore, "remove_checkpoint", no_room)
                patch.setattr(shutil, "rmtree", lambda *_, **__: None)
                assert (await delete(there, oldest)).status_code == 500
            assert len(folders(there, job_id)) == 3, "the leftovers of one, and the other"
            assert await there.models() == ["tiny", newest]
        async with server(tmp_path) as there:
            assert await there.models() == ["tiny", newest]
            assert await there.checkpoints(job_id) == [newest]
            assert folders(there, job_id) == ["checkpoints", "checkpoints/step-00000006"]

    run(scenario)


def test_a_deletion_that_failed_half_way_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await with_checkpoints(there, 3, 6)
            newest, oldest = await there.checkpoints(job_id)
            with monkeypatch.context() as patch:
                patch.setattr(EventStore, "remove_checkpoint", no_room)
                assert (await delete(there, oldest)).status_code == 500
            assert (await delete(there, oldest)).status_code == 200
            assert await there.checkpoints(job_id) == [newest]

    run(scenario)


@pytest.mark.parametrize("end", ["succeeded", "cancelled"])
def test_an_ended_job_is_deleted_with_all_that_it_made(tmp_path: Path, end: str) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            kept = await with_checkpoints(there, 2)
            await there.post(kept, "cancel")
            job_id = await with_checkpoints(there, 3)
            (checkpoint,) = await there.checkpoints(job_id)
            refused = await there.http.delete(f"{JOBS}/{job_id}")
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "job_in_use")
            if end == "succeeded":
                await there.say(success(there, job_id))
            else:
                await there.post(job_id, "cancel")
            answer = await there.http.delete(f"{JOBS}/{job_id}")
            assert answer.json() == {"id": job_id, "object": "fine_tuning.job", "deleted": True}
            assert unloaded(there)[-1] == checkpoint
        async with server(tmp_path) as there:
            assert not there.store.jobs.folder(job_id).exists()
            assert (await there.http.get(f"{JOBS}/{job_id}")).status_code == 404
            assert (await there.http.delete(f"{JOBS}/{job_id}")).status_code == 404
            assert [job["id"] for job in (await there.http.get(JOBS)).json()["data"]] == [kept]
            assert await there.models() == ["tiny", *await there.checkpoints(kept)]
            assert len(await there.messages(kept)) > 3

    run(scenario)


async def delete_at_once(there: Server, job_id: str) -> None:
    assert (await there.post(job_id, "cancel"))["status"] == "cancelled"
    assert (await there.http.delete(f"{JOBS}/{job_id}")).json()["deleted"]


@pytest.mark.parametrize("step", ["first", "make_folder"])
def test_a_job_deleted_as_its_validation_begins_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Whichever way to the disk of the two is slow."""
    begun, deleted = threading.Event(), threading.Event()
    first, make_folder = JobStore.first, JobStore.make_folder
    validating: list[Task] = []

    def slow_first(store: JobStore, status: JobStatus, base_fingerprint: str) -> JobRecord | None:
        job = first(store, status, base_fingerprint)
        if job is not None and status is JobStatus.VALIDATING:
            begun.set()
            deleted.wait(1)
        return job

    def slow_make_folder(store: JobStore, job_id: str) -> Path:
        begun.set()
        deleted.wait(1)
        return make_folder(store, job_id)

    async def prepare(task: Task) -> tuple[PreparedFile, ...]:
        validating.append(task)
        try:
            await asyncio.Event().wait()  # until it is cancelled
        finally:
            validating.remove(task)
        return ()

    async def scenario() -> None:
        async with server(tmp_path) as there:
            monkeypatch.setattr(JobStore, step, {"first": slow_first, "make_folder": slow_make_folder}[step])
            monkeypatch.setattr(validator, "prepare", prepare)
            job_id = str((await there.create())["id"])
            await asyncio.to_thread(begun.wait, 10)
            await delete_at_once(there, job_id)
            deleted.set()
            await asyncio.sleep(0.2)  # for what is wrong to happen
            async with asyncio.timeout(60):
                while validating or there.store.jobs.folder(job_id).exists():
                    await asyncio.sleep(0.01)

    run(scenario)


def test_a_job_deleted_while_its_files_are_validated_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that validates writes until the moment it is killed."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def prepare(task: Task) -> tuple[PreparedFile, ...]:
        begun.set()
        try:
            await asyncio.Event().wait()  # until it is cancelled
        finally:
            await asyncio.sleep(0.2)
            Path(task.files[0].target).parent.mkdir(exist_ok=True)
            ended.set()
        return ()

    async def scenario() -> None:
        async with server(tmp_path) as there:
            monkeypatch.setattr(validator, "prepare", prepare)
            job_id = str((await there.create())["id"])
            await begun.wait()
            await delete_at_once(there, job_id)
            async with asyncio.timeout(60):
                await ended.wait()
                while there.store.jobs.folder(job_id).exists():
                    await asyncio.sleep(0.01)

    run(scenario)


def test_a_folder_loses_its_name_in_one_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(path: Path, **_: object) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "weights").write_text("much")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", crash)
        with pytest.raises(KeyboardInterrupt):
            durable.remove_folder(folder)
    assert not folder.exists()
    durable.remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []
    durable.remove_folder(folder)  # which is gone


def test_checkpoints_that_the_worker_removed_leave_the_lists(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await with_checkpoints(there, 3)
            for step in (6, 9):
                path = write_adapter(there.store, job_id, "checkpoints", f"step-{step:08d}")
                durable.remove_folder(there.store.jobs.folder(job_id) / "checkpoints" / f"step-{step - 3:08d}")
                await there.say(CheckpointSaved(job_id, step, path, None))
                (name,) = await there.checkpoints(job_id)
                assert name.endswith(f":ckpt-step-{step}")
                assert await there.models() == ["tiny", name]
            assert (await there.messages(job_id))[-2:] == [
                "The checkpoint of step 6 was deleted",
                "Checkpoint created at step 9",
            ]

    run(scenario)


@pytest.mark.parametrize("read_late", [0, 1, 2])
def test_checkpoints_that_go_before_they_are_read_of_are_in_the_events(tmp_path: Path, read_late: int) -> None:
    """With ``save_total_limit`` 1 the worker removes each one when it has written the next, whoever has read of it."""

    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await there.started_job()
            before = await there.messages(job_id)
            unread: list[CheckpointSaved] = []
            for step in (3, 6, 9):
                path = write_adapter(there.store, job_id, "checkpoints", f"step-{step:08d}")
                durable.remove_folder(there.store.jobs.folder(job_id) / "checkpoints" / f"step-{step - 3:08d}")
                unread.append(CheckpointSaved(job_id, step, path, None))
                if len(unread) > read_late or step == 9:
                    await there.say(*unread)
                    unread.clear()
            expected = ["Checkpoint created at step 3"]
            for step in (6, 9):
                expected += [f"The checkpoint of step {step - 3} was deleted", f"Checkpoint created at step {step}"]
            assert (await there.messages(job_id))[len(before) :] == expected
            (name,) = await there.checkpoints(job_id)
            assert name.endswith(":ckpt-step-9")

    run(scenario)


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_files_may_be_deleted_while_they_are_paged_through(tmp_path: Path, order: str) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            ids = [await there.upload(b"x") for _ in range(5)]
            seen = await delete_all(there, "/v1/files", lambda file: f"/v1/files/{file['id']}", order=order)
            assert seen == (ids if order == "asc" else ids[::-1])
            assert (await there.http.get("/v1/files", params={"after": "file-none"})).status_code == 400

    run(scenario)


def test_jobs_may_be_deleted_while_they_are_paged_through(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            ids = await queue_of(there, 5)
            for job_id in ids:
                await there.post(job_id, "cancel")
            assert await delete_all(there, JOBS, lambda job: f"{JOBS}/{job['id']}") == ids[::-1]

    run(scenario)


def test_checkpoints_may_be_deleted_while_they_are_paged_through(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id, other = await with_checkpoints(there, 3, 6, 9, 12, 15), str((await there.create())["id"])
            await there.post(job_id, "cancel")
            names = await there.checkpoints(job_id)
            path = f"{JOBS}/{job_id}/checkpoints"
            gone = (await there.http.get(path, params={"limit": 1})).json()["last_id"]
            await delete_all(there, path, lambda checkpoint: f"/v1/models/{checkpoint['fine_tuned_model_checkpoint']}")
            assert unloaded(there)[-5:] == names
            assert (await there.http.get(path, params={"after": gone})).json()["data"] == []
            # It stood in another list than this one.
            elsewhere = await there.http.get(f"{JOBS}/{other}/checkpoints", params={"after": gone})
            assert (elsewhere.status_code, elsewhere.json()["error"]["param"]) == (400, "after")

    run(scenario)


async def delete_all(there: Server, path: str, path_of: Callable[[dict[str, Any]], str], **params: str) -> list[str]:
    """Page through a list as OpenAI's client does, and delete each item of a page before the next one is asked for.
    Returns the ids in the order in which they came."""
    seen: list[str] = []
    more = True
    while more:
        answer = await there.http.get(path, params={"limit": 2, **params, **({"after": seen[-1]} if seen else {})})
        assert answer.status_code == 200, answer.text
        for item in answer.json()["data"]:
            assert (await there.http.delete(path_of(item))).status_code == 200
            seen.append(item["id"])
        more = answer.json()["has_more"]
    return seen
