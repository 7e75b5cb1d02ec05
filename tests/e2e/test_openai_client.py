"""openai-python goes through all of it against a real server with the built-in model."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
import torch
import transformers
from openai.types.fine_tuning import FineTuningJob
from peft import PeftModel

from cotenant.models.registry import model_path
from serving import RunningServer, start_server

KEY = "sk-test-of-the-key"
EXAMPLES = [
    {
        "messages": [
            {"role": "user", "content": f"What does word {number} mean?"},
            {"role": "assistant", "content": f"Word {number} means a red boat number {number}."},
        ]
    }
    for number in range(24)
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = start_server(tmp_path_factory.mktemp("openai") / "data", "--api-key", KEY)
    yield running
    running.stop()


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture
def file_id(client: openai.OpenAI, tmp_path: Path) -> str:
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(json.dumps(example) for example in EXAMPLES), encoding="utf-8")
    with path.open("rb") as content:
        return client.files.create(file=content, purpose="fine-tune").id


def wait_for(get: Callable[[], FineTuningJob], *statuses: str, timeout_s: float = 60.0) -> FineTuningJob:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        job = get()
        if job.status in statuses:
            return job
        assert job.status not in ("failed", "succeeded", "cancelled"), (job.status, job.error)
        time.sleep(0.05)
    raise AssertionError(f"the job is {get().status}, not {statuses}, after {timeout_s:g} s")


def method(**hyperparameters: object) -> dict[str, object]:
    return {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}


def greedy_of_peft(adapter: Path, messages: list[dict[str, str]]) -> str:
    """What transformers and peft answer with the base model and this adapter."""
    base = model_path("tiny")
    model = PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(adapter)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    return str(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


def test_chat_stream_and_logprobs(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Hello, who are you?"}]
    whole = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=12)  # type: ignore[arg-type]
    assert whole.choices[0].message.content
    stream = client.chat.completions.create(
        model="tiny",
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=2,
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    logprobs = [
        entry
        for chunk in chunks
        if chunk.choices and chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert len(logprobs) == whole.usage.completion_tokens
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in logprobs), "greedy takes the likeliest"


def test_a_job_from_file_to_answers(server: RunningServer, client: openai.OpenAI, file_id: str) -> None:
    assert client.files.retrieve(file_id).status == "processed"
    assert len(client.files.content(file_id).text.splitlines()) == len(EXAMPLES)
    job = client.fine_tuning.jobs.create(
        model="tiny",
        training_file=file_id,
        suffix="boats",
        seed=3,
        metadata={"team": "harbour"},
        method=method(n_epochs=10, batch_size=8, learning_rate=3e-3, r=8),  # type: ignore[arg-type]
    )
    assert job.status == "validating_files"
    job = wait_for(lambda: client.fine_tuning.jobs.retrieve(job.id), "succeeded", timeout_s=120)
    assert job.fine_tuned_model
    assert job.fine_tuned_model.startswith("ft:tiny:")
    assert ":boats:" in job.fine_tuned_model
    assert job.trained_tokens > 0
    assert job.finished_at >= job.created_at
    figures = httpx.get(f"{server.base_url}/metrics", timeout=60).text
    assert 'cotenant:fine_tuning_jobs{model_name="tiny",status="succeeded"} 1.0' in figures
    assert 'cotenant:fine_tuning_jobs{model_name="tiny",status="running"} 0.0' in figures

    events = list(client.fine_tuning.jobs.list_events(job.id, limit=20))
    messages = [event.message for event in events][::-1]
    assert messages[0].startswith("Created fine-tuning job")
    assert "The job has successfully completed" in messages
    steps = [event.data["step"] for event in events if event.type == "metrics"]
    assert sorted(steps) == list(range(1, 31))

    result = client.files.content(job.result_files[0]).text.splitlines()
    assert result[0] == "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy"
    assert len(result) == 31
    assert float(result[-1].split(",")[1]) < float(result[1].split(",")[1])

    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job.id))
    assert [checkpoint.step_number for checkpoint in checkpoints] == list(range(30, 0, -3))
    cards = {card.id: card for card in client.models.list()}
    assert cards[job.fine_tuned_model].root != cards["tiny"].root  # type: ignore[attr-defined]

    question = EXAMPLES[5]["messages"][:1]
    for model in (job.fine_tuned_model, checkpoints[0].fine_tuned_model_checkpoint, "tiny"):
        answer = client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=24)  # type: ignore[arg-type]
        assert ("red boat" in (answer.choices[0].message.content or "")) == (model != "tiny")

    adapter = Path(cards[job.fine_tuned_model].root)  # type: ignore[attr-defined]
    for example in EXAMPLES[:4]:
        answer = client.chat.completions.create(
            model=job.fine_tuned_model,
            messages=example["messages"][:1],  # type: ignore[arg-type]
            temperature=0,
            max_tokens=24,
        )
        assert answer.choices[0].message.content == greedy_of_peft(adapter, example["messages"][:1])


def test_models_of_a_job_are_deleted(client: openai.OpenAI, file_id: str) -> None:
    settings = method(n_epochs=2, batch_size=8, r=8)
    job = client.fine_tuning.jobs.create(model="tiny", training_file=file_id, method=settings)  # type: ignore[arg-type]
    job = wait_for(lambda: client.fine_tuning.jobs.retrieve(job.id), "succeeded", timeout_s=120)
    newest, oldest = client.fine_tuning.jobs.checkpoints.list(job.id)
    folders = {card.id: Path(card.root) for card in client.models.list()}  # type: ignore[attr-defined]
    messages = EXAMPLES[5]["messages"][:1]
    for model in (job.fine_tuned_model or "", newest.fine_tuned_model_checkpoint):
        client.chat.completions.create(model=model, messages=messages, max_tokens=2)  # type: ignore[arg-type]
        deleted = client.models.delete(model)
        assert (deleted.id, deleted.object, deleted.deleted) == (model, "model", True)
        assert not folders[model].exists()
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model=model, messages=messages, max_tokens=2)  # type: ignore[arg-type]
        with pytest.raises(openai.NotFoundError):
            client.models.delete(model)
    assert [checkpoint.id for checkpoint in client.fine_tuning.jobs.checkpoints.list(job.id)] == [oldest.id]
    assert client.fine_tuning.jobs.retrieve(job.id).fine_tuned_model == job.fine_tuned_model
    answer = client.chat.completions.create(
        model=oldest.fine_tuned_model_checkpoint,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=2,
    )
    assert answer.choices[0].finish_reason
    with pytest.raises(openai.BadRequestError, match="base model"):
        client.models.delete("tiny")


def test_a_preference_job_with_early_stopping(client: openai.OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    pairs = [
        {
            "input": {"messages": example["messages"][:1]},
            "preferred_output": example["messages"][1:],
            "non_preferred_output": [{"role": "assistant", "content": "A word is a word."}],
        }
        for example in EXAMPLES
    ]
    path.write_text("\n".join(json.dumps(pair) for pair in pairs), encoding="utf-8")
    with path.open("rb") as content:
        file = client.files.create(file=content, purpose="fine-tune").id
    settings = {"beta": 0.2, "learning_rate": 2e-3, "n_epochs": 30, "early_stopping_patience": 2}
    job = client.fine_tuning.jobs.create(
        model="tiny",
        training_file=file,
        validation_file=file,
        method={"type": "dpo", "dpo": {"hyperparameters": {**settings, "metric_for_best_model": "rewards/accuracies"}}},
    )
    job = wait_for(lambda: client.fine_tuning.jobs.retrieve(job.id), "succeeded", timeout_s=120)
    assert job.method is not None
    assert job.method.type == "dpo"
    assert job.method.dpo is not None
    assert job.method.dpo.hyperparameters is not None
    assert job.method.dpo.hyperparameters.beta == 0.2
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=500))
    measured = [event.data for event in reversed(events) if event.type == "metrics"]
    assert measured[0]["rewards/margins"] == pytest.approx(0.0, abs=1e-4)
    assert measured[-1]["full_valid_rewards/accuracies"] == 1.0
    assert len(measured) < measured[0]["total_steps"]
    messages = [event.message for event in events]
    assert any(message.startswith("Stopped early after step ") for message in messages)
    assert any("the best on the validation file" in message for message in messages)
    answer = client.chat.completions.create(
        model=job.fine_tuned_model or "", messages=[{"role": "user", "content": "What does word 3 mean?"}], max_tokens=8
    )
    assert answer.choices[0].message.content


def test_pause_resume_and_cancel_act_within_a_second(client: openai.OpenAI, file_id: str) -> None:
    """Each of them in one job of several at least: a machine that pauses does not do so each time. One that is slow
    throughout, or writes slowly, has as much more time as a file then takes that is stored and deleted."""
    late_s: dict[str, list[float]] = {"paused": [], "running": [], "cancelled": []}

    def timed(act: Callable[[str], FineTuningJob], job_id: str, status: str) -> None:
        start_s = time.monotonic()
        act(job_id)
        wait_for(lambda: client.fine_tuning.jobs.retrieve(job_id), status)
        end_s = time.monotonic()
        client.files.delete(client.files.create(file=b"x", purpose="user_data").id)
        late_s[status].append(end_s - start_s - (time.monotonic() - end_s))

    while not all(min(found_s, default=1.0) < 1.0 for found_s in late_s.values()):
        assert len(late_s["cancelled"]) < 10, late_s
        job = client.fine_tuning.jobs.create(
            model="tiny",
            training_file=file_id,
            method=method(max_steps=100_000, batch_size=8),  # type: ignore[arg-type]
        )
        wait_for(lambda: client.fine_tuning.jobs.retrieve(job.id), "running")  # noqa: B023 - called at once
        timed(client.fine_tuning.jobs.pause, job.id, "paused")
        timed(client.fine_tuning.jobs.resume, job.id, "running")
        timed(client.fine_tuning.jobs.cancel, job.id, "cancelled")
        with pytest.raises(openai.BadRequestError, match="cancelled"):
            client.fine_tuning.jobs.cancel(job.id)


def test_jobs_run_one_after_the_other(client: openai.OpenAI, file_id: str) -> None:
    first, second = (
        client.fine_tuning.jobs.create(
            model="tiny",
            training_file=file_id,
            method=method(max_steps=steps, batch_size=8),  # type: ignore[arg-type]
        )
        for steps in (100_000, 3)
    )
    wait_for(lambda: client.fine_tuning.jobs.retrieve(first.id), "running")
    wait_for(lambda: client.fine_tuning.jobs.retrieve(second.id), "queued")
    with pytest.raises(openai.APIStatusError, match=r"in use|job"):
        client.files.delete(file_id)
    client.fine_tuning.jobs.cancel(first.id)
    wait_for(lambda: client.fine_tuning.jobs.retrieve(second.id), "succeeded")


def test_a_wrong_key_is_refused(server: RunningServer) -> None:
    stranger = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="sk-other", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
