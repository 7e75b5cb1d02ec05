"""``/v1/fine_tuning/jobs`` over HTTP: what clients send, and what they get back."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from api_jobs.support import (
    JOBS,
    READY,
    RecordingWorker,
    example,
    examples,
    report,
    run,
    server,
    success,
    write_adapter,
)
from cotenant.wire.messages import CheckpointSaved, JobMetrics, JobStarted, JobSucceeded, JobWarning, StartJob


def test_a_jobs_whole_life(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            validation_file = await there.upload(examples(3))
            job = await there.create(
                suffix="demo",
                seed=7,
                metadata={"team": "blue"},
                validation_file=validation_file,
                method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "r": 8}}},
            )
            assert job["status"] == "validating_files"
            assert (job["object"], job["model"], job["organization_id"]) == ("fine_tuning.job", "tiny", "acme")
            assert job["hyperparameters"] == {
                "n_epochs": 2,
                "batch_size": "auto",
                "learning_rate_multiplier": "auto",
            }
            assert (job["fine_tuned_model"], job["error"], job["result_files"]) == (None, None, [])

            job_id = job["id"]
            await there.wait_started(job_id)
            job = await there.job(job_id)
            assert job["status"] == "running"
            assert job["hyperparameters"] == {"n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": 1.0}
            extra = job["method"]["supervised"]["hyperparameters"]
            assert (extra["r"], extra["lora_alpha"], extra["learning_rate"]) == (8, 16.0, 2e-4)
            assert (job["seed"], job["metadata"]) == (7, {"team": "blue"})

            start = there.worker.sent[0]
            assert isinstance(start, StartJob)
            assert start.spec.recorded_step == 0
            assert Path(start.spec.dataset_path).is_file()
            assert start.spec.validation_path is not None
            assert Path(start.spec.validation_path).is_file()
            assert start.spec.hyperparameters.seed == 7

            before_s = time.time()
            await there.say(JobStarted(job_id, 6, 0, 40.0), report(job_id, 1, 2), report(job_id, 3, valid=True))
            path = success(there, job_id)
            checkpoint = write_adapter(there.store, job_id, "checkpoints", "step-00000003")
            await there.say(CheckpointSaved(job_id, 3, checkpoint, report(job_id, 3).steps[0]))
            running = await there.job(job_id)
            assert running["trained_tokens"] == 120
            assert before_s + 59 < running["estimated_finish"] < time.time() + 61
            before_s = time.time()
            await there.say(JobMetrics(job_id, (), 120, 600.0))
            running = await there.job(job_id)
            assert running["trained_tokens"] == 120
            assert before_s + 599 < running["estimated_finish"] < time.time() + 601
            await there.say(report(job_id, 4, 5, 6), path)

            job = await there.job(job_id)
            name = job["fine_tuned_model"]
            base, organization, suffix, short = name.removeprefix("ft:").split(":")
            assert (base, organization, suffix) == ("tiny", "acme", "demo")
            assert short in job_id
            assert (job["status"], job["trained_tokens"], job["estimated_finish"]) == ("succeeded", 240, None)
            assert job["finished_at"] >= job["created_at"]
            served = there.store.find_adapter(name)
            assert served is not None
            assert served.path == path.path

            assert await there.messages(job_id) == [
                f"Created fine-tuning job: {job_id}",
                f"Validating training file: {job['training_file']} and validation file: {validation_file}",
                "Files validated, moving job to queued state",
                "Fine-tuning job started",
                "Step 1/6: training loss=2.0000",
                "Step 2/6: training loss=1.0000",
                "Step 3/6: training loss=0.6667, validation loss=1.5000",
                "Checkpoint created at step 3",
                "Step 4/6: training loss=0.5000",
                "Step 5/6: training loss=0.4000",
                "Step 6/6: training loss=0.3333",
                f"New fine-tuned model created: {name}",
                "The job has successfully completed",
            ]
            step = next(event for event in await there.events(job_id) if event["type"] == "metrics")
            assert (step["object"], step["level"]) == ("fine_tuning.job.event", "info")
            assert (step["data"]["step"], step["data"]["train_loss"], step["data"]["total_steps"]) == (1, 2.0, 6)
            assert "valid_loss" not in step["data"]

            page = (await there.http.get(f"{JOBS}/{job_id}/checkpoints")).json()
            assert [point["fine_tuned_model_checkpoint"] for point in page["data"]] == [f"{name}:ckpt-step-3"]
            assert page["data"][0]["step_number"] == 3
            assert page["data"][0]["metrics"]["train_loss"] == pytest.approx(2 / 3)
            assert page["first_id"] == page["last_id"] == page["data"][0]["id"]

            (result_file,) = job["result_files"]
            content = (await there.http.get(f"/v1/files/{result_file}/content")).text
            assert content.splitlines() == [
                "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy",
                "1,2.0,0.5,,",
                "2,1.0,0.5,,",
                "3,0.6666666666666666,0.5,1.5,0.25",
                "4,0.5,0.5,,",
                "5,0.4,0.5,,",
                "6,0.3333333333333333,0.5,,",
            ]
            file = (await there.http.get(f"/v1/files/{result_file}")).json()
            assert (file["purpose"], file["bytes"]) == ("fine-tune-results", len(content))

    run(scenario)


def test_an_early_stop_and_the_chosen_step_are_said(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await there.started_job()
            path = write_adapter(there.store, job_id, "adapter")
            await there.say(report(job_id, 1, 2, 3, 4, valid=True))
            await there.say(JobStarted(job_id, total_steps=4, resumed_step=4, step_tokens=40.0))  # after a crash
            await there.say(JobSucceeded(job_id, path, trained_tokens=160, total_steps=4, best_step=2))
            stopped, created, _ = (await there.messages(job_id))[-3:]
            assert stopped == "Stopped early after step 4 of 6: the validation file shows no more progress"
            assert created.startswith("New fine-tuned model created: ft:tiny:acme::")
            assert created.endswith(", with the adapter of step 2, the best on the validation file")

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "status", "param", "says"),
    [
        ({"model": "gpt-4o"}, 404, "model", "'gpt-4o' does not exist"),
        ({"model": 3}, 400, "model", "string"),
        ({"training_file": None}, 400, "training_file", "Missing"),
        ({"training_file": "file-none"}, 400, "training_file", "no file 'file-none'"),
        ({"training_file": "../../etc/passwd"}, 400, "training_file", "no file"),
        ({"validation_file": "file-none"}, 400, "validation_file", "no file 'file-none'"),
        ({"suffix": "a" * 65}, 400, "suffix", "64"),
        ({"suffix": "../up"}, 400, "suffix", "letters"),
        ({"suffix": "a:b"}, 400, "suffix", "letters"),
        ({"seed": -1}, 400, "seed", ">= 0"),
        ({"seed": 2**40}, 400, "seed", "<="),
        ({"seed": "x"}, 400, "seed", "integer"),
        ({"metadata": {"k": 1}}, 400, "metadata", "string"),
        ({"metadata": {"k" * 65: "v"}}, 400, "metadata", "64"),
        ({"metadata": {"k": "v" * 513}}, 400, "metadata", "512"),
        ({"metadata": {str(number): "v" for number in range(17)}}, 400, "metadata", "16"),
        ({"integrations": [{"type": "wandb"}]}, 400, "integrations", "not supported"),
        ({"method": {"type": "dpo", "dpo": {"beta": 1}}}, 400, "method.dpo.beta", "beta"),
        ({"method": {"type": "dpo", "supervised": {}}}, 400, "method.supervised", "does not belong"),
        (
            {"method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0}}}},
            400,
            "method.dpo.hyperparameters.beta",
            "above 0",
        ),
        (
            {"method": {"type": "dpo", "dpo": {"hyperparameters": {"packing": True}}}},
            400,
            "method.dpo.hyperparameters.packing",
            "false",
        ),
        (
            {"method": {"type": "supervised", "supervised": {"hyperparameters": {"beta": 0.1}}}},
            400,
            "method.supervised.hyperparameters.beta",
            "Unknown hyperparameter 'beta'",
        ),
        ({"method": {"type": "reinforcement"}}, 400, "method.type", "'reinforcement' is not supported"),
        ({"method": {"type": "magic"}}, 400, "method.type", "'magic'"),
        ({"method": {"type": "supervised", "extra": 1}}, 400, "method.extra", "extra"),
        ({"method": {"type": "supervised", "dpo": {}}}, 400, "method.dpo", "dpo"),
        ({"hyperparameters": {"n_epochs": -1}}, 400, "hyperparameters.n_epochs", "whole number"),
        ({"hyperparameters": {"early_stopping_patience": 2}}, 400, "validation_file", "'early_stopping_patience'"),
        ({"hyperparameters": {"load_best_model_at_end": True}}, 400, "validation_file", "add 'validation_file'"),
        ({"hyperparameters": {"magic": 1}}, 400, "hyperparameters.magic", "'magic'"),
        ({"hyperparameters": {"seed": 1}, "seed": 2}, 400, "seed", "different"),
        (
            {"method": {"type": "supervised", "supervised": {"hyperparameters": {"r": 1000}}}},
            400,
            "method.supervised.hyperparameters.r",
            "64",
        ),
        (
            {
                "hyperparameters": {"n_epochs": 1},
                "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2}}},
            },
            400,
            "hyperparameters.n_epochs",
            "different",
        ),
        ({"epochs": 3}, 400, "epochs", "epochs"),
    ],
)
def test_a_bad_request_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], status: int, param: str, says: str
) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            body = {"model": "tiny", "training_file": await there.upload(examples()), **fields}
            answer = await there.http.post(JOBS, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (status, param), error
            assert says in error["message"]
            assert (await there.http.get(JOBS)).json()["data"] == []

    run(scenario)


def test_files_of_another_purpose_and_broken_json_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            batch = await there.upload(examples(), "batch")
            for param in ("training_file", "validation_file"):
                fields = {"training_file": await there.upload(examples()), param: batch}
                answer = await there.http.post(JOBS, json={"model": "tiny", **fields})
                assert answer.status_code == 400
                assert answer.json()["error"]["param"] == param
                assert "'batch'" in answer.json()["error"]["message"]
            for body in (b"{", b"[]", b"\xff", b'{"model": "\\ud800"}'):
                answer = await there.http.post(JOBS, content=body)
                assert answer.status_code == 400
                assert answer.json()["error"]["code"] == "invalid_json"

    run(scenario)


@pytest.mark.parametrize(
    ("content", "validation", "code", "says"),
    [
        (examples(3), None, "invalid_n_examples", "Training file has 3 example(s)"),
        (examples(56) + b"{broken\n" + examples(3), None, "invalid_training_file", "57"),
        (examples(11) + example("Hm?", ""), None, "invalid_training_file", "12"),
        (examples(11) + example("Long?", "so long " * 5000), None, "invalid_training_file", "512"),
        (examples().decode().encode("utf-16"), None, "invalid_training_file", "UTF-16"),
        (examples(), b"[1]\n", "invalid_validation_file", "not a dictionary"),
    ],
)
def test_a_job_with_bad_files_fails_and_says_why(
    tmp_path: Path, content: bytes, validation: bytes | None, code: str, says: str
) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            fields = {"training_file": await there.upload(content)}
            if validation is not None:
                fields["validation_file"] = await there.upload(validation)
            job = await there.wait((await there.create(**fields))["id"], "failed")
            assert job["error"]["code"] == code
            assert says in job["error"]["message"]
            assert job["error"]["param"] == ("training_file" if validation is None else "validation_file")
            assert job["finished_at"] is not None
            last = (await there.events(job["id"]))[-1]
            assert (last["level"], last["message"]) == ("error", job["error"]["message"])
            assert there.worker.sent == []
            deleted = await there.http.delete(f"/v1/files/{fields['training_file']}")
            assert deleted.status_code == 200

    run(scenario)


def test_examples_longer_than_max_length_are_cut_and_this_is_said(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            content = examples(11) + example("Long?", "so long " * 20)
            job_id = await there.started_job(
                training_file=await there.upload(content), hyperparameters={"max_length": 32}
            )
            warnings = [event["message"] for event in await there.events(job_id) if event["level"] == "warn"]
            assert len(warnings) == 1
            assert "max_length=32" in warnings[0]

    run(scenario)


def test_an_example_longer_than_the_context_is_cut_where_max_length_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            content = examples(11) + example("Long?", "so long " * 600)
            refused = await there.create(training_file=await there.upload(content))
            failed = await there.wait(refused["id"], "failed")
            assert "or give max_length, which cuts what is longer" in failed["error"]["message"]
            job_id = await there.started_job(
                training_file=await there.upload(content), hyperparameters={"max_length": 512}
            )
            (warning,) = [event["message"] for event in await there.events(job_id) if event["level"] == "warn"]
            assert "max_length=512" in warning

    run(scenario)


def test_what_the_worker_warns_of_is_an_event(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await there.started_job()
            await there.say(JobStarted(job_id, 9, 0, 1.0), JobWarning(job_id, "There is nothing to measure"))
            warnings = [event["message"] for event in await there.events(job_id) if event["level"] == "warn"]
            assert warnings == ["There is nothing to measure"]
            assert (await there.job(job_id))["status"] == "running"

    run(scenario)


def test_the_old_and_the_new_place_of_hyperparameters(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job = await there.create(
                hyperparameters={"n_epochs": 5, "batch_size": "auto", "learning_rate_multiplier": 0.1},
                method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 5, "save_steps": 2}}},
                integrations=[],
                suffix="",
            )
            job = await there.wait(job["id"], "running")
            assert job["hyperparameters"] == {"n_epochs": 5, "batch_size": 4, "learning_rate_multiplier": 0.1}
            extra = job["method"]["supervised"]["hyperparameters"]
            assert (extra["save_steps"], extra["learning_rate"]) == (2, pytest.approx(2e-5))

    run(scenario)


def test_a_fine_tuned_model_is_no_base(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            job_id = await there.started_job()
            await there.say(success(there, job_id))
            name = (await there.job(job_id))["fine_tuned_model"]
            assert "::" in name  # no suffix
            body = {"model": name, "training_file": await there.upload(examples())}
            answer = await there.http.post(JOBS, json=body)
            assert answer.status_code == 400
            assert "only the base model 'tiny'" in answer.json()["error"]["message"]

    run(scenario)


@pytest.mark.parametrize("param", ["training_file", "validation_file"])
def test_a_file_that_is_deleted_while_its_job_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, param: str
) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            body = {"training_file": await there.upload(examples()), "validation_file": await there.upload(examples())}
            create = there.store.jobs.create

            def delete_and_create(*arguments: Any) -> Any:
                there.store.files.delete(body[param])
                return create(*arguments)

            monkeypatch.setattr(there.store.jobs, "create", delete_and_create)
            answers = [await there.http.post(JOBS, json={"model": "tiny", **body}) for _ in range(2)]
            for answer in answers:  # the second time it is gone before
                assert answer.status_code == 400
                assert answer.json()["error"] == answers[0].json()["error"]
                assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (param, "file_not_found")
            assert there.store.jobs.page().items == []

    run(scenario)


def test_lists_and_filters(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path, RecordingWorker(ready=None)) as there:
            file = await there.upload(examples())
            ids = [
                (await there.create(training_file=file, metadata={"n": str(number % 2)}))["id"] for number in range(3)
            ]
            page = (await there.http.get(JOBS, params={"limit": 2})).json()
            assert ([job["id"] for job in page["data"]], page["has_more"]) == ([ids[2], ids[1]], True)
            page = (await there.http.get(JOBS, params={"after": ids[1]})).json()
            assert ([job["id"] for job in page["data"]], page["has_more"]) == ([ids[0]], False)
            page = (await there.http.get(JOBS, params={"metadata[n]": "0"})).json()
            assert [job["id"] for job in page["data"]] == [ids[2], ids[0]]
            plain = (await there.create(training_file=file))["id"]
            page = (await there.http.get(JOBS, params={"metadata": "null"})).json()
            assert [job["id"] for job in page["data"]] == [plain]
            others = (await there.http.get(f"{JOBS}/{ids[1]}/events")).json()["data"]
            for path, params in (
                ("", {"limit": 0}),
                ("", {"limit": 10**30}),
                ("", {"after": "ftjob-none"}),
                ("", {"metadata": "blue"}),
                ("", {"metadata": "null", "metadata[n]": "0"}),
                (f"/{ids[0]}/events", {"after": "x"}),
                (f"/{ids[0]}/events", {"after": others[0]["id"]}),
                (f"/{ids[0]}/checkpoints", {"limit": -1}),
            ):
                answer = await there.http.get(f"{JOBS}{path}", params=params)
                assert answer.status_code == 400
                assert answer.json()["error"]["param"] == next(iter(params))

    run(scenario)


@pytest.mark.parametrize("path", ["", "/events", "/checkpoints", "/cancel", "/pause", "/resume"])
def test_unknown_jobs_are_not_found(tmp_path: Path, path: str) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            method = "POST" if path in ("/cancel", "/pause", "/resume") else "GET"
            answer = await there.http.request(method, f"{JOBS}/ftjob-%2e%2e{path}")
            assert answer.status_code == 404
            assert "ftjob-.." in json.dumps(answer.json())

    run(scenario)


def test_nothing_can_be_created_while_the_model_is_loading(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path, RecordingWorker(ready=None, last_ready=None)) as there:
            body = {"model": "tiny", "training_file": await there.upload(examples())}
            answer = await there.http.post(JOBS, json=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            there.worker.ready = there.worker.last_ready = READY
            await there.jobs.on_worker_ready()
            assert (await there.http.post(JOBS, json=body)).status_code == 200

    run(scenario)


def test_a_file_in_use_cannot_be_deleted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            file = await there.upload(examples())
            job_id = await there.started_job(training_file=file)
            refused = await there.http.delete(f"/v1/files/{file}")
            assert refused.status_code == 409
            assert job_id in refused.json()["error"]["message"]
            assert (await there.http.get(f"/v1/files/{file}/content")).content == examples()
            await there.post(job_id, "cancel")
            assert (await there.http.delete(f"/v1/files/{file}")).status_code == 200

    run(scenario)


def test_the_openapi_document_describes_what_is_answered(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            document = (await there.http.get("/openapi.json")).json()
            references = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document))
            assert set(references) <= document["components"]["schemas"].keys()
            job = await there.create()
            assert job.keys() == document["components"]["schemas"]["Job"]["properties"].keys()
            assert set(document["paths"][JOBS]) == {"get", "post"}
            assert set(document["paths"][JOBS + "/{job_id}"]) == {"get", "delete"}
            for path in ("/v1/files/{file_id}", "/v1/models/{model_id}"):
                assert set(document["paths"][path]) == {"get", "delete"}

    run(scenario)


@pytest.mark.parametrize("method", ["supervised", "dpo"])
def test_answers_as_clients_write_them_are_trained_on(tmp_path: Path, method: str) -> None:
    nothing = {**dict.fromkeys(("name", "function_call", "audio", "refusal", "reasoning_content")), "tool_calls": []}
    question: dict[str, Any] = {**nothing, "role": "user", "content": "Hi"}
    answers: list[dict[str, Any]] = [{**nothing, "role": "assistant", "content": text} for text in ("Hello!", "No.")]
    line = {"messages": [question, answers[0]]}
    if method == "dpo":
        outputs = {"preferred_output": answers[:1], "non_preferred_output": answers[1:]}
        line = {"input": {"messages": [question]}, **outputs}

    async def scenario() -> None:
        async with server(tmp_path) as there:
            file = await there.upload((json.dumps(line) + "\n").encode() * 10)
            job = await there.create(training_file=file, method={"type": method})
            job = await there.wait(job["id"], "running", "failed")
            assert job["error"] is None

    run(scenario)
