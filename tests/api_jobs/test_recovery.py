"""The queue of jobs across the deaths of both processes, and a full disk."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from api_jobs.support import (
    JOBS,
    READY,
    RecordingWorker,
    die,
    die_and_start_again,
    examples,
    metrics,
    queue_of,
    report,
    run,
    server,
    stops,
    success,
    write_adapter,
)
from cotenant.api.jobs import manager
from cotenant.store import JobStatus, StoreError
from cotenant.wire.messages import (
    CheckpointSaved,
    JobCancelled,
    JobFailed,
    JobMetrics,
    JobPaused,
    JobStarted,
    JobSucceeded,
    JobWarning,
    StartJob,
)

pytestmark = pytest.mark.usefixtures("_validation_in_a_thread")


# What happens to the worker


def test_when_the_worker_dies_the_running_job_is_started_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id, _ = await queue_of(there, 2)
            await there.say(JobStarted(job_id, 6, 0, 40.0), report(job_id, 1, 2, 3))
            await die(there)
            await there.wait_started(job_id, job_id)
            again = there.worker.sent[-1]
            assert isinstance(again, StartJob)
            assert again.spec.recorded_step == 3
            # It goes back to its checkpoint and reports what it does again.
            await there.say(JobStarted(job_id, 6, 1, 40.0), report(job_id, 2, 3), report(job_id, 4))
            steps = [event["data"]["step"] for event in await there.events(job_id) if event["type"] == "metrics"]
            assert steps == [1, 2, 3, 4]
            assert (await there.messages(job_id)).count("Fine-tuning job started") == 1

    run(scenario)


def test_stopping_a_job_while_there_is_no_worker_takes_effect_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            first, second, third = await queue_of(there, 3)
            there.worker.ready = None
            assert (await there.post(first, "cancel"))["status"] == "cancelled"
            assert (await there.post(second, "pause"))["status"] == "paused"
            # The last words of the worker that died change nothing.
            await there.say(report(first, 1), success(there, first))
            assert (await there.job(first))["status"] == "cancelled"
            await die(there)
            await there.wait_started(first, third)
            assert stops(there.worker) == []

    run(scenario)


def test_a_stop_that_the_dying_worker_never_saw_is_done_by_the_next_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path, RecordingWorker(obedient=False)) as there:
            first, second = await queue_of(there, 2)
            pausing = asyncio.create_task(there.post(first, "pause"))
            while not stops(there.worker):
                await asyncio.sleep(0.01)
            await die(there)
            assert (await pausing)["status"] == "paused"
            await there.wait_started(first, second)

    run(scenario)


def test_a_job_that_kills_every_worker_is_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            bad, good = await queue_of(there, 2)
            for _ in range(1, manager.MAX_FRUITLESS_DEATHS):
                await die_and_start_again(there, bad)
            await there.say(report(bad, 1))  # progress: not given up yet
            for _ in range(1, manager.MAX_FRUITLESS_DEATHS):
                await die_and_start_again(there, bad)
                await there.say(report(bad, 1))  # the same step again is no progress, nor is an estimate
                await there.say(JobMetrics(bad, (), 40, 60.0))
            await die(there)
            failed = await there.wait(bad, "failed")
            assert failed["error"]["code"] == "worker_died"
            await there.wait_started(good)

    run(scenario)


def test_messages_about_unknown_or_finished_jobs_change_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await there.started_job()
            await there.say(success(there, job_id))
            before = await there.job(job_id), await there.messages(job_id)
            await there.say(
                JobStarted(job_id, 9, 0, 1.0),
                report(job_id, 7),
                JobWarning(job_id, "too late"),
                JobPaused(job_id, 7),
                JobCancelled(job_id, 7),
                JobFailed(job_id, "x", "y", 7),
                JobSucceeded(job_id, "/elsewhere", 1, 1),
                JobStarted("ftjob-none", 9, 0, 1.0),
                JobWarning("ftjob-none", "who?"),
                report("ftjob-none", 1),
                CheckpointSaved("ftjob-none", 1, "/nowhere", None),
                JobPaused("ftjob-none", 7),
                JobFailed("ftjob-none", "x", "y", 7),
                READY,
            )
            assert (await there.job(job_id), await there.messages(job_id)) == before
            assert len((await there.http.get("/v1/files")).json()["data"]) == 2  # the examples and one result file

    run(scenario)


# What happens to the API process


def test_after_a_restart_everything_goes_on_where_it_was(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path, RecordingWorker(obedient=False)) as there:
            done, running, queued, paused = await queue_of(there, 4)
            await there.say(success(there, done))
            await there.wait_started(done, running)
            await there.say(JobStarted(running, 6, 0, 40.0), report(running, 1, 2))
            await there.post(paused, "pause")
            validating = str((await there.create())["id"])
            before = {job_id: await there.messages(job_id) for job_id in (done, running, queued, paused)}

        async with server(tmp_path, RecordingWorker(ready=None, last_ready=None)) as there:
            # Its validation may have ended just before the first server did, or since the second began.
            assert (await there.job(validating))["status"] in ("validating_files", "queued")
            assert [(await there.job(job_id))["status"] for job_id in (done, running, queued, paused)] == [
                "succeeded", "running", "queued", "paused",
            ]  # fmt: skip
            assert {job_id: await there.messages(job_id) for job_id in before} == before
            there.worker.ready = there.worker.last_ready = READY
            await there.jobs.on_worker_ready()
            await there.wait_started(running)
            start = there.worker.sent[0]
            assert isinstance(start, StartJob)
            assert start.spec.recorded_step == 2
            await there.wait(validating, "queued")
            for job_id, following in ((running, queued), (queued, validating)):
                await there.say(success(there, job_id))
                await there.wait_started(following)

    run(scenario)


def test_a_stop_that_was_asked_for_before_a_crash_is_carried_out_after_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        for action, status in (("cancel", "cancelled"), ("pause", "paused")):
            folder = tmp_path / action
            async with server(folder, RecordingWorker(obedient=False)) as there:
                job_id = await there.started_job()
                stopping = asyncio.create_task(there.post(job_id, action))
                while not stops(there.worker):
                    await asyncio.sleep(0.01)
                stopping.cancel()
            async with server(folder) as there:
                assert (await there.wait(job_id, status))["status"] == status
                assert there.worker.started == []

    run(scenario)


def test_draining_leaves_the_running_job_running_and_starts_no_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            running, queued = await queue_of(there, 2)
            await there.say(JobStarted(running, 6, 0, 40.0))
            there.jobs.begin_drain()
            await there.say(report(running, 1, 2), JobPaused(running, 2))
            await asyncio.sleep(0.05)
            assert (await there.job(running))["status"] == "running"
            assert there.worker.started == [running]
            body = {"model": "tiny", "training_file": await there.upload(examples())}
            refused = await there.http.post("/v1/fine_tuning/jobs", json=body)
            assert refused.status_code == 503

        async with server(tmp_path) as there:
            await there.wait_started(running)
            assert (await there.job(queued))["status"] == "queued"

    run(scenario)


def test_a_client_that_pauses_while_the_server_drains_is_obeyed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await there.started_job()
            there.jobs.begin_drain()
            assert (await there.post(job_id, "pause"))["status"] == "paused"

    run(scenario)


def test_under_a_policy_that_never_trains_jobs_wait_and_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            running = await there.started_job()
            await there.say(report(running, 1, 2))

        async with server(tmp_path, policy="inference-only") as there:
            new = str((await there.create())["id"])
            for job_id in (running, new):
                async with asyncio.timeout(30):
                    while not (warned := [e for e in await there.events(job_id) if e["level"] == "warn"]):
                        await asyncio.sleep(0.01)
                assert (await there.job(job_id))["status"] == "queued"
                assert [event["message"] for event in warned] == [
                    "This server's policy is inference-only: nothing trains until it is started with another --policy"
                ]
                assert f"job {job_id} waits: This server's policy is inference-only" in caplog.text
            assert there.worker.sent == []

        async with server(tmp_path) as there:
            await there.wait_started(running)
            await there.say(success(there, running))
            await there.wait_started(running, new)

    run(scenario)


# What happens to the disk


class FullDisk:
    """Makes a method of the store fail a number of times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, num_failures: int) -> None:
        self.num_failures = num_failures
        method = getattr(owner, name)

        def failing(*arguments: Any, **named: Any) -> Any:
            if self.num_failures > 0:
                self.num_failures -= 1
                raise StoreError("The disk with the data folder is full.", code="disk_full")
            return method(*arguments, **named)

        monkeypatch.setattr(owner, name, failing)


def test_metrics_that_cannot_be_stored_are_stored_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "RETRY_DELAYS_S", (0.01, 0.01, 0.01))

    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await there.started_job()
            FullDisk(monkeypatch, there.store.events, "add_metrics", 3)
            await there.say(report(job_id, 1, 2))
            assert there.store.events.recorded_step(job_id) == 2
            FullDisk(monkeypatch, there.store.events, "add_metrics", 30)  # the last delay is repeated
            await there.say(report(job_id, 3))
            assert there.store.events.recorded_step(job_id) == 3
            assert (await there.job(job_id))["status"] == "running"

    run(scenario)


def test_a_failure_is_recorded_without_room_for_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await there.started_job()
            checkpoint = there.store.jobs.folder(job_id) / "checkpoints" / "step-00000002"
            checkpoint.mkdir(parents=True)
            (checkpoint / "adapter_config.json").write_text("{}")
            FullDisk(monkeypatch, there.store.events, "add_checkpoint", 1000)
            monkeypatch.setattr(manager, "RETRY_DELAYS_S", (600.0,))  # whoever tries again does so for longer
            await asyncio.wait_for(there.say(JobFailed(job_id, "disk_full", "The disk is full.", 2)), 60)
            job = await there.job(job_id)
            assert (job["status"], job["error"]["code"]) == ("failed", "disk_full")

    run(scenario)


def test_a_job_starts_with_space_set_aside_for_its_failure(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            (tmp_path / "BALLAST").unlink()  # as the last full disk has left it
            await there.started_job()
            assert (tmp_path / "BALLAST").stat().st_size > 1_000_000

    run(scenario)


def test_waiting_for_the_disk_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await there.started_job()
            FullDisk(monkeypatch, there.store.events, "add_metrics", 1000)
            monkeypatch.setattr(manager, "RETRY_DELAYS_S", (600.0,))
            saying = asyncio.create_task(there.say(report(job_id, 1)))
            await asyncio.sleep(0.3)
            assert not saying.done()
            there.jobs.begin_drain()
            with pytest.raises(StoreError):
                await asyncio.wait_for(saying, 60)

    run(scenario)


def test_without_room_for_the_result_file_the_job_still_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await there.started_job()
            FullDisk(monkeypatch, there.store.files, "place", 1)
            await there.say(success(there, job_id))
            job = await there.job(job_id)
            assert (job["status"], job["result_files"]) == ("succeeded", [])
            warning = next(event for event in await there.events(job_id) if event["level"] == "warn")
            assert "full" in warning["message"]

    run(scenario)


def test_the_queue_goes_on_after_the_disk_was_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.api.jobs.wakeable.RETRY_S", 0.05)

    async def scenario() -> None:
        async with server(tmp_path) as there:
            first, second = await queue_of(there, 2)
            FullDisk(monkeypatch, there.store.jobs, "first", 2)
            await there.say(success(there, first))
            await there.wait_started(first, second)

    run(scenario)


def test_stopping_reports_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await there.started_job()
            FullDisk(monkeypatch, there.store.jobs, "change", 1)
            answer = await there.http.post(f"/v1/fine_tuning/jobs/{job_id}/cancel")
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "disk_full")
            assert stops(there.worker) == []
            record = there.store.jobs.get(job_id)
            assert (record.status, record.pending) == (JobStatus.RUNNING, None)

    run(scenario)


def test_many_reported_steps_are_cheap(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await there.started_job()
            took_s: list[float] = []
            while min(took_s, default=2) >= 2 and len(took_s) < 5:  # a machine that pauses does not do so each time
                last = 2000 * (len(took_s) + 1)
                began_s = time.monotonic()
                await there.say(JobMetrics(job_id, metrics(*range(last - 1999, last + 1)), 40 * last, 1.0))
                took_s.append(time.monotonic() - began_s)
                assert there.store.events.recorded_step(job_id) == last
            assert min(took_s) < 2

    run(scenario)


def test_a_warning_of_a_job_that_is_begun_again_is_not_repeated(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            (job_id,) = await queue_of(there, 1)
            for text in ("packing is off", "another", "packing is off"):
                await there.wait_started(job_id)
                await there.say(JobStarted(job_id, 6, 0, 40.0), JobWarning(job_id, text))
            messages = await there.messages(job_id)
            assert (messages.count("packing is off"), messages.count("another")) == (1, 1)

    run(scenario)


def test_a_job_that_goes_on_has_no_estimate_until_it_has_gone_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            (job_id,) = await queue_of(there, 1)
            await there.say(JobStarted(job_id, 6, 0, 40.0), report(job_id, 1, remaining_s=60.0))
            assert (await there.job(job_id))["estimated_finish"] is not None
            await die(there)
            await there.wait_started(job_id, job_id)
            await there.say(JobStarted(job_id, 6, 1, 40.0))
            assert (await there.job(job_id))["estimated_finish"] is None
            await there.say(report(job_id, 2, remaining_s=30.0))
            assert (await there.job(job_id))["estimated_finish"] is not None

    run(scenario)


def test_a_folder_that_cannot_be_read_for_a_moment_loses_no_job_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([OSError(errno.EMFILE, "Too many open files")])
    listed = Path.iterdir

    def failing(path: Path) -> Iterator[Path]:
        error = next(failures, None) if path.name == "checkpoints" else None
        if error is not None:
            raise error
        return listed(path)

    async def scenario() -> None:
        async with server(tmp_path) as there:
            (job_id,) = await queue_of(there, 1)
            write_adapter(there.store, job_id, "checkpoints", "step-00000002")
            monkeypatch.setattr(Path, "iterdir", failing)
            monkeypatch.setattr(manager, "RETRY_DELAYS_S", (0.01,))
            await there.say(JobStarted(job_id, 6, 0, 40.0), JobCancelled(job_id, 2))
            assert (await there.job(job_id))["status"] == "cancelled"
            (name,) = await there.checkpoints(job_id)
            assert name.endswith(":ckpt-step-2")

    run(scenario)


def test_a_checkpoint_whose_step_was_never_reported_has_its_figures(tmp_path: Path) -> None:
    """Its evaluation was still to come when the job was cancelled."""

    async def scenario() -> None:
        async with server(tmp_path) as there:
            (job_id,) = await queue_of(there, 1)
            folder = Path(write_adapter(there.store, job_id, "checkpoints", "step-00000002"))
            (folder / "trainer_state.json").write_bytes(msgspec.json.encode({"step": 2, "metrics": metrics(2)[0]}))
            await there.say(JobStarted(job_id, 6, 0, 40.0), report(job_id, 1), JobCancelled(job_id, 2))
            (checkpoint,) = (await there.http.get(f"{JOBS}/{job_id}/checkpoints")).json()["data"]
            assert checkpoint["metrics"]["step"] == 2
            assert checkpoint["metrics"]["train_loss"] == metrics(2)[0].train_loss
            reported = [event for event in await there.events(job_id) if event["type"] == "metrics"]
            assert sorted(event["data"]["step"] for event in reported) == [1, 2]

    run(scenario)
