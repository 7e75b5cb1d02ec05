"""Jobs whose base model is not the one that is served wait for it, and nobody else waits for them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from api_jobs.support import READY, RecordingWorker, Server, report, run, server, stops, success
from cotenant.api.jobs import validator
from cotenant.wire.messages import JobStarted, StartJob

pytestmark = pytest.mark.usefixtures("_validation_in_a_thread")


async def warnings(there: Server, job_id: str) -> list[str]:
    return [event["message"] for event in await there.events(job_id) if event["level"] == "warn"]


async def wait_warned(there: Server, job_id: str) -> None:
    async with asyncio.timeout(60):
        while not await warnings(there, job_id):
            await asyncio.sleep(0.01)


async def leave(there: Server) -> dict[str, str]:
    """A running, a queued and a paused job, by status."""
    running = await there.started_job()
    await there.say(report(running, 1, 2))
    queued = str((await there.create())["id"])
    paused = str((await there.create())["id"])
    for job_id in (queued, paused):
        await there.wait(job_id, "queued")
    await there.post(paused, "pause")
    return {"running": running, "queued": queued, "paused": paused}


def test_jobs_of_another_base_wait_for_it_untouched(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path, base="first") as there:
            left = await leave(there)
            before: dict[str, Any] = {job_id: await there.messages(job_id) for job_id in left.values()}

        for _ in range(2):  # said once, not with every start
            async with server(tmp_path, base="second") as there:
                own = await there.started_job()
                for job_id in (left["running"], left["queued"]):
                    assert (await there.wait(job_id, "queued"))["status"] == "queued"
                    await wait_warned(there, job_id)
                    [said] = await warnings(there, job_id)
                    assert "belongs to another base model" in said
                    assert "first" in said
                    assert await there.messages(job_id) == [*before[job_id], said]
                assert (await there.job(left["paused"]))["status"] == "paused"
                assert there.worker.started == [own]
                await there.say(success(there, own))

        async with server(tmp_path, base="first") as there:
            await there.wait_started(left["running"])
            start = there.worker.sent[0]
            assert isinstance(start, StartJob)
            assert start.spec.recorded_step == 2
            await there.say(JobStarted(left["running"], 6, 2, 40.0))
            assert (await there.messages(left["running"]))[-1] == "Fine-tuning job goes on from step 2"
            await there.say(success(there, left["running"]))
            await there.wait_started(left["running"], left["queued"])

    run(scenario)


def test_files_of_another_bases_job_are_validated_for_that_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(validator, "prepare", lambda task: asyncio.Event().wait())  # the server ends meanwhile
            async with server(tmp_path, base="first") as there:
                job_id = str((await there.create())["id"])

        async with server(tmp_path, base="second") as there:
            await wait_warned(there, job_id)
            own = await there.started_job()
            assert (await there.job(job_id))["status"] == "validating_files"
            assert there.worker.started == [own]

        async with server(tmp_path, base="first") as there:
            await there.wait_started(job_id)

    run(scenario)


def test_stopping_and_resuming_jobs_of_another_base(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path, base="first") as there:
            left = await leave(there)
        async with server(tmp_path, base="second") as there:
            assert (await there.post(left["paused"], "resume"))["status"] == "queued"
            await wait_warned(there, left["paused"])
            assert (await there.post(left["paused"], "cancel"))["status"] == "cancelled"
            await there.wait(left["running"], "queued")
            assert (await there.post(left["running"], "pause"))["status"] == "paused"
            assert there.worker.sent == []

    run(scenario)


def test_a_stop_that_was_asked_for_under_its_own_base_is_carried_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path, RecordingWorker(obedient=False), base="first") as there:
            job_id = await there.started_job()
            stopping = asyncio.create_task(there.post(job_id, "cancel"))
            while not stops(there.worker):
                await asyncio.sleep(0.01)
            stopping.cancel()
        async with server(tmp_path, RecordingWorker(ready=None, last_ready=READY), base="second") as there:
            assert (await there.wait(job_id, "cancelled"))["status"] == "cancelled"

    run(scenario)
