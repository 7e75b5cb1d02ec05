"""Jobs that end are counted by how they do."""

from __future__ import annotations

import re
from pathlib import Path

from api_jobs.support import Server, example, queue_of, run, server, success
from cotenant.wire.messages import JobFailed

ENDED = re.compile(r'cotenant:fine_tuning_jobs_ended_total\{code="(\w*)",model_name="tiny",status="(\w+)"\} (\S+)')


async def ended(there: Server) -> dict[tuple[str, str], float]:
    """How many jobs, by status and code."""
    text = (await there.http.get("/metrics")).text
    return {(status, code): float(count) for code, status, count in ENDED.findall(text)}


def test_each_end_of_a_job_is_counted_once_by_its_status_and_code(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            assert await ended(there) == {}
            job_id = await there.started_job()
            for _ in range(2):  # a worker may say things twice
                await there.say(JobFailed(job_id, "disk_full", "The disk is full.", 0))
            assert await ended(there) == {("failed", "disk_full"): 1}
            await there.post(job_id, "resume")
            await there.wait_started(job_id, job_id)
            assert (await there.post(job_id, "pause"))["status"] == "paused"
            assert await ended(there) == {("failed", "disk_full"): 1}, "it has not ended again"
            assert (await there.post(job_id, "cancel"))["status"] == "cancelled"

            refused = await there.create(training_file=await there.upload(example("Who?", "I.")))
            assert (await there.wait(refused["id"], "failed"))["error"]["code"] == "invalid_n_examples"
            first, second = await queue_of(there, 2)
            await there.wait_started(first)
            await there.say(success(there, first))
            await there.wait_started(second)
            await there.say(JobFailed(second, "disk_full", "The disk is full.", 0))
            expected = {
                ("failed", "disk_full"): 2,
                ("failed", "invalid_n_examples"): 1,
                ("cancelled", ""): 1,
                ("succeeded", ""): 1,
            }
            assert await ended(there) == expected
            assert (await there.http.delete(f"/v1/fine_tuning/jobs/{refused['id']}")).status_code == 200
            assert await ended(there) == expected, "a counter does not go back"

        async with server(tmp_path) as there:
            assert await ended(there) == {}, "counted since the server's start"

    run(scenario)
