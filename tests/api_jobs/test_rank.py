"""Jobs whose adapter has a higher rank than a later server serves wait for one that serves it, and so do models."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from api_jobs.support import Server, report, run, server, success, write_adapter
from cotenant.wire.messages import CheckpointSaved, StartJob

pytestmark = pytest.mark.usefixtures("_validation_in_a_thread")


def of_rank(**hyperparameters: Any) -> dict[str, Any]:
    return {"method": {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}}


async def wait_warned(there: Server, job_id: str) -> list[str]:
    async with asyncio.timeout(60):
        while not (said := [event["message"] for event in await there.events(job_id) if event["level"] == "warn"]):
            await asyncio.sleep(0.01)
    return said


def test_jobs_of_a_higher_rank_wait_and_say_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path, max_lora_rank=128) as there:
            running = await there.started_job(**of_rank(r=128))
            await there.say(report(running, 1, 2))
            queued = str((await there.create(**of_rank(r=8, rank_pattern={"q_proj": 100})))["id"])
            fits = str((await there.create(**of_rank(r=64)))["id"])
            await there.wait(fits, "queued")

        for _ in range(2):  # said once, not with every start
            async with server(tmp_path, max_lora_rank=64) as there:
                await there.wait_started(fits)
                for job_id, rank in ((running, 128), (queued, 100)):
                    [said] = await wait_warned(there, job_id)
                    assert f"rank is {rank}" in said
                    assert f"--max-lora-rank {rank} " in said
                    assert (await there.job(job_id))["status"] == "queued"
                assert there.worker.started == [fits]

        async with server(tmp_path, max_lora_rank=64) as there:
            await there.wait_started(fits)
            await there.say(success(there, fits))
            assert (await there.post(queued, "cancel"))["status"] == "cancelled"
            new = await there.started_job(**of_rank(r=32))
            assert there.worker.started == [fits, new]
            await there.say(success(there, new))

        async with server(tmp_path, max_lora_rank=128) as there:
            await there.wait_started(running)
            start = there.worker.sent[0]
            assert isinstance(start, StartJob)
            assert start.spec.recorded_step == 2

    run(scenario)


def test_models_of_a_higher_rank_are_not_served_and_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with server(tmp_path, max_lora_rank=128) as there:
            trained = []
            named = {"r": 128, "rank_pattern": {"q_proj": 64, "v_proj": 8}, "target_modules": ["q_proj", "v_proj"]}
            for hyperparameters in ({"r": 128}, {"r": 8, "rank_pattern": {"q_proj": 100}}, {"r": 64}, named):
                job_id = await there.started_job(**of_rank(**hyperparameters))
                folder = write_adapter(there.store, job_id, "checkpoints", "step-00000003")
                await there.say(CheckpointSaved(job_id, 3, folder, None), success(there, job_id))
                trained += [*await there.checkpoints(job_id), str((await there.job(job_id))["fine_tuned_model"])]
            assert await there.models() == ["tiny", *trained]
        assert "not served" not in caplog.text

        async with server(tmp_path, max_lora_rank=64) as there:
            assert await there.models() == ["tiny", *trained[4:]]
            for name, rank in zip(trained, (128, 128, 100, 100), strict=False):
                answer = await there.http.get(f"/v1/models/{name}")
                assert answer.status_code == 404
                error = answer.json()["error"]
                assert error["code"] == "model_not_served"
                assert f"rank is {rank}, and this server serves none of more than 64" in error["message"]
                assert f"--max-lora-rank {rank} " in error["message"]
            [said] = [record.getMessage() for record in caplog.records if "not served" in record.getMessage()]
            assert "--max-lora-rank 128 to serve all of them" in said
            for name, rank in zip(trained[:4], (128, 128, 100, 100), strict=True):
                assert f"{name} (rank {rank})" in said
            assert not any(name in said for name in trained[4:])
            assert (await there.http.delete(f"/v1/models/{trained[1]}")).status_code == 200

        async with server(tmp_path, max_lora_rank=128) as there:
            assert await there.models() == ["tiny", trained[0], *trained[2:]]

    run(scenario)
