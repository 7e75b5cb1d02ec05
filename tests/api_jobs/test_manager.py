"""The queue of jobs: its order, and stopping jobs in every state."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from api_jobs.support import (
    JOBS,
    TINY,
    RecordingWorker,
    queue_of,
    report,
    run,
    server,
    stops,
    success,
    write_adapter,
)
from cotenant.api.jobs import manager
from cotenant.core.errors import InvalidInputError
from cotenant.store.events import EventStore
from cotenant.wire.messages import (
    CancelJob,
    CheckpointSaved,
    JobCancelled,
    JobFailed,
    JobPaused,
    JobStarted,
    PauseJob,
    StartJob,
)

pytestmark = pytest.mark.usefixtures("_validation_in_a_thread")


def test_jobs_run_one_at_a_time_in_order_of_creation(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            first, second, third = await queue_of(there, 3)
            assert there.worker.started == [first]
            assert [(await there.job(job_id))["status"] for job_id in (second, third)] == ["queued", "queued"]
            await there.say(success(there, first))
            await there.wait_started(first, second)
            await there.say(JobFailed(second, "disk_full", "The disk is full.", 2))
            await there.wait_started(first, second, third)
            failed = await there.job(second)
            assert failed["status"] == "failed"
            message = "The disk is full. Once that is mended, resume the job: it has no checkpoint and begins with the "
            assert failed["error"] == {"code": "disk_full", "message": f"{message}first step.", "param": None}

    run(scenario)


def test_a_folder_below_home_is_named_whole_to_those_who_read_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever loads an adapter looks for its base by that name, and expands nothing."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()

    async def scenario() -> None:
        async with server(tmp_path / "data", model="~/model") as there:
            await there.started_job()
            (start,) = [message for message in there.worker.sent if isinstance(message, StartJob)]
            assert start.spec.base_model == str(TINY)

    run(scenario)


def test_a_paused_job_lets_the_next_one_run_and_comes_back_before_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "SETTLE_TIMEOUT_S", 600.0)  # whoever waits for it in vain does so for longer

    async def scenario() -> None:
        async with server(tmp_path) as there:
            first, second, third = await queue_of(there, 3)
            await there.say(JobStarted(first, 6, 0, 40.0), report(first, 1, 2))
            async with asyncio.timeout(60):
                paused = await there.post(first, "pause")
            assert (paused["status"], paused["estimated_finish"]) == ("paused", None)
            await there.wait_started(first, second)

            assert (await there.post(first, "resume"))["status"] == "queued"
            await there.say(success(there, second))
            await there.wait_started(first, second, first)
            assert (await there.job(third))["status"] == "queued"
            again = there.worker.sent[-1]
            assert isinstance(again, StartJob)
            assert again.spec.recorded_step == 2
            await there.say(JobStarted(first, 6, 2, 40.0))
            assert (await there.messages(first))[-3:] == [
                "Fine-tuning job paused",
                "Fine-tuning job resumed",
                "Fine-tuning job goes on from step 2",
            ]

    run(scenario)


def test_cancelling_in_every_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "SETTLE_TIMEOUT_S", 600.0)  # as above

    async def scenario() -> None:
        async with server(tmp_path) as there:
            running, queued, paused = await queue_of(there, 3)
            assert (await there.post(paused, "pause"))["status"] == "paused"
            validating = str((await there.create())["id"])
            for job_id in (validating, paused, queued, running):
                async with asyncio.timeout(60):
                    assert (await there.post(job_id, "cancel"))["status"] == "cancelled"
                assert (await there.messages(job_id))[-1] == "Fine-tuning job cancelled"
            assert stops(there.worker) == [(CancelJob, running)]

            # None of them comes back, and the next one is not held up.
            later = await there.started_job()
            assert there.worker.started == [running, later]
            for action in ("cancel", "pause", "resume"):
                refused = await there.post(queued, action)
                assert "has status 'cancelled'" in refused["error"]["message"]
            await there.say(success(there, later))
            refused = await there.post(later, "cancel")
            assert "has status 'succeeded'" in refused["error"]["message"]

    run(scenario)


def test_stopping_what_cannot_be_stopped(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            running, queued = await queue_of(there, 2)
            for job_id, action in ((running, "resume"), (queued, "resume")):
                with pytest.raises(InvalidInputError, match="cannot be resumed"):
                    await there.jobs.resume(job_id)
                assert (await there.http.post(f"/v1/fine_tuning/jobs/{job_id}/{action}")).status_code == 400
            await there.post(queued, "pause")
            assert "already" in (await there.post(queued, "pause"))["error"]["message"]

    run(scenario)


def test_a_job_paused_during_validation_is_validated_when_it_is_resumed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = str((await there.create())["id"])
            assert (await there.post(job_id, "pause"))["status"] == "paused"
            await asyncio.sleep(0.2)
            assert (await there.job(job_id))["status"] == "paused"
            assert (await there.post(job_id, "resume"))["status"] == "validating_files"
            await there.wait_started(job_id)

    run(scenario)


@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_a_job_that_ends_without_a_result_keeps_its_checkpoints_as_models(tmp_path: Path, end: str) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await there.started_job()
            await there.say(report(job_id, 1, 2, 3))
            for step in (1, 3):  # the best one, and the last one, which the worker writes when it is told to stop
                write_adapter(there.store, job_id, "checkpoints", f"step-{step:08d}")
            if end == "failed":
                await there.say(JobFailed(job_id, "training_diverged", "The loss is not finite.", 3))
            else:
                await there.post(job_id, "cancel")
            assert (await there.job(job_id))["status"] == end
            checkpoints = there.store.events.checkpoint_page(job_id).items
            assert [checkpoint.step for checkpoint in checkpoints] == [3, 1]
            for checkpoint in checkpoints:
                assert checkpoint.metrics is not None
                assert checkpoint.metrics["step"] == checkpoint.step
                assert there.store.find_adapter(checkpoint.name) is not None

    run(scenario)


def test_checkpoints_are_listed_by_their_steps_whenever_they_were_made_known(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await there.started_job()
            await there.say(report(job_id, 1, 2, 3, 4))
            for step in (1, 2, 3, 4):
                path = write_adapter(there.store, job_id, "checkpoints", f"step-{step:08d}")
                if step in (1, 3):  # of the others, the best one and the last one, is said when the job has ended
                    await there.say(CheckpointSaved(job_id, step, path, None))
            await there.post(job_id, "cancel")
            pages, after = [], {}
            while True:
                page = (await there.http.get(f"{JOBS}/{job_id}/checkpoints", params={"limit": 2, **after})).json()
                pages.append([checkpoint["step_number"] for checkpoint in page["data"]])
                if not page["has_more"]:
                    break
                after = {"after": page["last_id"]}
            assert pages == [[4, 3], [2, 1]]

    run(scenario)


@pytest.mark.parametrize("announced", [True, False])
def test_the_checkpoint_that_gave_a_loss_that_is_not_finite_is_not_served(tmp_path: Path, announced: bool) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await there.started_job()
            await there.say(report(job_id, 1, 2, 3))
            for step in (2, 3):
                path = write_adapter(there.store, job_id, "checkpoints", f"step-{step:08d}")
                if announced:
                    await there.say(CheckpointSaved(job_id, step, path, None))
            await there.say(JobFailed(job_id, "training_diverged", "The loss is not finite.", 3, bad_step=3))
            (kept,) = there.store.events.checkpoint_page(job_id).items
            assert kept.step == 2
            assert there.store.find_adapter(kept.name) is not None
            assert there.store.find_adapter(kept.name.replace("step-2", "step-3")) is None
            *_, withdrawn, failure = await there.events(job_id)
            assert (failure["level"], failure["message"]) == ("error", "The loss is not finite.")
            if announced:
                assert withdrawn["level"] == "warn"
                assert "The checkpoint of step 3 is not served any more" in withdrawn["message"]
            else:
                assert withdrawn["message"] == "Checkpoint created at step 2"

    run(scenario)


def test_a_job_that_finishes_while_it_is_being_cancelled_has_succeeded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path, RecordingWorker(obedient=False)) as there:
            job_id = await there.started_job()
            cancelling = asyncio.create_task(there.post(job_id, "cancel"))
            while not stops(there.worker):
                await asyncio.sleep(0.01)
            await there.say(success(there, job_id), JobCancelled(job_id, 0))
            assert (await cancelling)["status"] == "succeeded"

    run(scenario)


def test_a_job_resumed_before_the_worker_has_paused_it_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path, RecordingWorker(obedient=False)) as there:
            job_id = await there.started_job()
            pausing = asyncio.create_task(there.post(job_id, "pause"))
            while not stops(there.worker):
                await asyncio.sleep(0.01)
            assert (await there.post(job_id, "resume"))["status"] == "running"
            await there.say(JobPaused(job_id, 2))
            await pausing
            await there.wait_started(job_id, job_id)

    run(scenario)


def test_cancelling_wins_over_pausing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path, RecordingWorker(obedient=False)) as there:
            job_id, following = await queue_of(there, 2)
            await there.say(JobStarted(job_id, 6, 0, 40.0))
            pausing = asyncio.create_task(there.post(job_id, "pause"))
            cancelling = asyncio.create_task(there.post(job_id, "cancel"))
            while len(stops(there.worker)) < 2:
                await asyncio.sleep(0.01)
            for kind, _ in stops(there.worker):
                await there.say(JobPaused(job_id, 2) if kind is PauseJob else JobCancelled(job_id, 0))
            assert (await cancelling)["status"] == "cancelled"
            await pausing
            await there.wait_started(job_id, following)

    run(scenario)


@pytest.mark.parametrize(
    ("action", "confirmed", "requested", "done"),
    [
        ("pause", JobPaused, "Pause requested; it takes effect when", "paused"),
        ("cancel", JobCancelled, "Cancellation requested; it takes effect when", "cancelled"),
    ],
)
def test_a_stop_that_the_worker_is_slow_to_confirm_is_told_of(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    action: str,
    confirmed: type[JobPaused | JobCancelled],
    requested: str,
    done: str,
) -> None:
    monkeypatch.setattr(manager, "SETTLE_TIMEOUT_S", 0.01)

    async def scenario() -> None:
        async with server(tmp_path, RecordingWorker(obedient=False)) as there:
            job_id = await there.started_job()
            before = await there.messages(job_id)
            for _ in range(2):  # who asks again is told the same, and the events are not
                assert (await there.post(job_id, action))["status"] == "running"
                (said,) = (await there.messages(job_id))[len(before) :]
                assert said.startswith(requested)
            refused = await there.http.delete(f"{JOBS}/{job_id}")
            assert refused.status_code == 409
            assert f"cannot be deleted: it is being {done}. " in refused.json()["error"]["message"]
            assert ("Cancel it or" in refused.json()["error"]["message"]) == (action == "pause")
            if action == "cancel":
                refused = await there.http.post(f"{JOBS}/{job_id}/resume")
                assert "cannot be resumed: it is being cancelled." in refused.json()["error"]["message"]
            await there.say(confirmed(job_id, 2))
            assert (await there.job(job_id))["status"] == done
            assert (await there.messages(job_id))[-1] == f"Fine-tuning job {done}"

    run(scenario)


def test_a_pause_that_is_still_to_come_is_withdrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "SETTLE_TIMEOUT_S", 0.01)

    async def scenario() -> None:
        async with server(tmp_path, RecordingWorker(obedient=False)) as there:
            job_id = await there.started_job()
            await there.post(job_id, "pause")
            assert (await there.post(job_id, "resume"))["status"] == "running"
            requested, resumed = (await there.messages(job_id))[-2:]
            assert requested.startswith("Pause requested")
            assert resumed == "Fine-tuning job resumed"
            await there.say(JobPaused(job_id, 2))
            await there.wait_started(job_id, job_id)

    run(scenario)


def test_no_job_is_started_once_the_server_drains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it was about to be: the worker would run it after it has been told to end."""
    about_to_start, draining = threading.Event(), threading.Event()
    recorded_step = EventStore.recorded_step

    def slow_recorded_step(store: EventStore, job_id: str) -> int:
        about_to_start.set()
        draining.wait(10)
        return recorded_step(store, job_id)

    async def scenario() -> None:
        async with server(tmp_path) as there:
            monkeypatch.setattr(EventStore, "recorded_step", slow_recorded_step)
            job_id = str((await there.create())["id"])
            assert await asyncio.to_thread(about_to_start.wait, 20)
            there.jobs.begin_drain()
            draining.set()
            assert (await there.post(job_id, "pause"))["status"] == "paused"  # which waits for what was begun
            assert there.worker.started == []
        async with server(tmp_path) as there:
            await there.post(job_id, "resume")
            await there.wait_started(job_id)

    run(scenario)
