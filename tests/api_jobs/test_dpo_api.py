"""DPO over HTTP: its method, its files, its figures. The worker is a recording one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from api_jobs.support import JOBS, examples, metrics, run, server, success, write_adapter
from cotenant.core.job import PreferenceMetrics
from cotenant.wire.messages import CheckpointSaved, JobMetrics, StartJob


def pairs(num_examples: int = 12, **changes: object) -> bytes:
    """A preference file; ``changes`` are to its third line."""
    lines = []
    for number in range(1, num_examples + 1):
        line: dict[str, object] = {
            "input": {"messages": [{"role": "user", "content": f"What is {number}?"}]},
            "preferred_output": [{"role": "assistant", "content": f"It is {number}."}],
            "non_preferred_output": [{"role": "assistant", "content": "I cannot say."}],
        }
        lines.append(line | changes if number == 3 else line)
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def test_a_dpo_job_reaches_the_worker_and_is_echoed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            method = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.3, "n_epochs": 2, "r": 4}}}
            job = await there.create(training_file=await there.upload(pairs()), method=method)
            await there.wait_started(job["id"])
            spec = next(message.spec for message in there.worker.sent if isinstance(message, StartJob))
            hyper = spec.hyperparameters
            assert (hyper.method, hyper.beta, hyper.n_epochs, hyper.r) == ("dpo", 0.3, 2, 4)
            shown = (await there.job(job["id"]))["method"]
            assert shown["type"] == "dpo"
            assert shown.keys() == {"type", "dpo"}
            assert shown["dpo"]["hyperparameters"]["beta"] == 0.3
            assert shown["dpo"]["hyperparameters"]["learning_rate_multiplier"] == 1
            again = await there.create(training_file=await there.upload(pairs()), method=shown)
            await there.wait(again["id"], "queued")

    run(scenario)


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        (pairs(9), "invalid_n_examples", "has 9 example(s)"),
        (examples(), "invalid_training_file", "Line 1: it has 'messages', which is for method.type 'supervised'"),
        (pairs(preferred_output=None), "invalid_training_file", "Line 3 has no 'preferred_output'"),
        (
            pairs(non_preferred_output=[{"role": "user", "content": "Hm"}]),
            "invalid_training_file",
            "Line 3, 'non_preferred_output', message 1: its role is 'user'",
        ),
    ],
)
def test_bad_preference_files(tmp_path: Path, content: bytes, code: str, says: str) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job = await there.create(training_file=await there.upload(content), method={"type": "dpo"})
            error = (await there.wait(job["id"], "failed"))["error"]
            assert (error["code"], error["param"]) == (code, "training_file")
            assert says in error["message"]

    run(scenario)


def test_preferences_given_to_a_supervised_job_say_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job = await there.create(training_file=await there.upload(pairs()))
            message = (await there.wait(job["id"], "failed"))["error"]["message"]
            assert "Line 1: it is a preference example, which is for method.type 'dpo'" in message

    run(scenario)


def test_rewards_have_trls_names_everywhere(tmp_path: Path) -> None:
    rewards = PreferenceMetrics(0.5, -0.25, 0.75, 0.75, -20.0, -30.0)

    async def scenario() -> None:
        async with server(tmp_path) as there:
            method = {"type": "dpo"}
            job_id = await there.started_job(training_file=await there.upload(pairs()), method=method)
            first, second = metrics(1, 2, valid=True)
            steps = (replace(first, preference=rewards), replace(second, preference=rewards, valid_preference=rewards))
            await there.say(JobMetrics(job_id, steps, 80, None))
            await there.say(CheckpointSaved(job_id, 2, write_adapter(there.store, job_id, "ckpt"), steps[1]))
            data = [event["data"] for event in await there.events(job_id) if event["type"] == "metrics"]
            assert data[0]["rewards/margins"] == 0.75
            assert (data[0]["logps/chosen"], data[0]["logps/rejected"]) == (-20.0, -30.0)
            assert "valid_rewards/margins" not in data[0]
            assert data[1]["valid_rewards/accuracies"] == 0.75
            page = (await there.http.get(f"{JOBS}/{job_id}/checkpoints")).json()
            assert page["data"][0]["metrics"]["rewards/chosen"] == 0.5
            assert page["data"][0]["metrics"]["full_valid_loss"] is None

    run(scenario)


def test_the_result_file_has_rewards(tmp_path: Path) -> None:
    rewards = PreferenceMetrics(0.5, -0.25, 0.75, 0.75, -20.0, -30.0)

    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await there.started_job(training_file=await there.upload(pairs()), method={"type": "dpo"})
            (step,) = metrics(1)
            await there.say(JobMetrics(job_id, (replace(step, preference=rewards),), 40, None))
            await there.say(success(there, job_id))
            (result_file,) = (await there.job(job_id))["result_files"]
            content = (await there.http.get(f"/v1/files/{result_file}/content")).text
            assert content.splitlines() == [
                "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy,"
                "rewards/chosen,rewards/rejected,rewards/accuracies,rewards/margins",
                "1,2.0,0.5,,,0.5,-0.25,0.75,0.75",
            ]

    run(scenario)


def test_a_batch_larger_than_the_data_is_said(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            # With packing a batch is of rows, which the worker counts.
            for size, packing, warned in ((13, False, True), (12, False, False), (13, True, False)):
                job = await there.create(hyperparameters={"batch_size": size, "packing": packing})
                await there.wait(job["id"], "queued", "running")
                said = [event["message"] for event in await there.events(job["id"]) if event["level"] == "warn"]
                expected = "batch_size is 13, but the training file has 12 examples: each step takes all of them"
                assert said == ([expected] if warned else [])

    run(scenario)
