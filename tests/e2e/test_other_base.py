"""Servers of several base models on one data folder, one after the other."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from cotenant.models.registry import model_path
from serving import RunningServer, running_server

JOBS = "/v1/fine_tuning/jobs"
FLAGS = ("--load-format", "dummy", "--max-model-len", "256")
ROWS = [
    {"messages": [{"role": "user", "content": f"Where is {n}?"}, {"role": "assistant", "content": f"Behind {n + 1}."}]}
    for n in range(12)
]


@pytest.fixture
def shallow(tmp_path: Path) -> str:
    """The built-in model with one layer less."""
    folder = Path(shutil.copytree(model_path("tiny"), tmp_path / "shallow"))
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] -= 1
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def client(server: RunningServer) -> httpx.Client:
    return httpx.Client(base_url=server.base_url, timeout=30)


def create(http: httpx.Client, model: str, **hyperparameters: Any) -> str:
    content = "\n".join(map(json.dumps, ROWS))
    file = http.post("/v1/files", files={"file": ("a.jsonl", content)}, data={"purpose": "fine-tune"}).json()["id"]
    method = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
    answer = http.post(JOBS, json={"model": model, "training_file": file, "method": method})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def wait(http: httpx.Client, job_id: str, status: str, min_steps: int = 0) -> dict[str, Any]:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        job: dict[str, Any] = http.get(f"{JOBS}/{job_id}").json()
        if job["status"] == status and len(steps(http, job_id)) >= min_steps:
            return job
        assert job["status"] != "failed", job["error"]
        time.sleep(0.05)
    raise AssertionError(job)


def events(http: httpx.Client, job_id: str) -> list[dict[str, Any]]:
    return list(http.get(f"{JOBS}/{job_id}/events", params={"limit": 1000}).json()["data"])


def steps(http: httpx.Client, job_id: str) -> list[int]:
    return sorted(event["data"]["step"] for event in events(http, job_id) if event["type"] == "metrics")


def test_jobs_and_their_models_belong_to_their_base(tmp_path: Path, shallow: str) -> None:
    data = tmp_path / "data"
    with running_server(data, *FLAGS, "--seed", "1") as server, client(server) as http:
        done = wait(http, create(http, "tiny", max_steps=2, r=4), "succeeded")
        wide = wait(http, create(http, "tiny", max_steps=1, r=8), "succeeded")["fine_tuned_model"]
        interrupted = create(http, "tiny", max_steps=400, r=4, save_steps=1)
        wait(http, interrupted, "running", min_steps=3)
        server.stop()

    for model, seed in (("tiny", "2"), (shallow, "1")):
        with running_server(data, *FLAGS, "--seed", seed, model=model) as server, client(server) as http:
            own = wait(http, create(http, model, max_steps=2, r=4), "succeeded")
            waiting = wait(http, interrupted, "queued")
            assert waiting["error"] is None
            told = [event for event in events(http, interrupted) if event["level"] == "warn"]
            assert len(told) == 1
            assert "another base model than the one that is served: 'tiny'" in told[0]["message"]
            listed = [card["id"] for card in http.get("/v1/models").json()["data"]]
            assert own["fine_tuned_model"] in listed
            assert done["fine_tuned_model"] not in listed
            assert not any(interrupted.removeprefix("ftjob-")[:6] in name for name in listed)
            body = {"model": done["fine_tuned_model"], "prompt": "a", "max_tokens": 1}
            for answer in (http.post("/v1/completions", json=body), http.get(f"/v1/models/{body['model']}")):
                assert answer.status_code == 404
                assert "belongs to another base model" in answer.json()["error"]["message"]

    with (
        running_server(data, *FLAGS, "--seed", "1", "--max-lora-rank", "4") as server,
        client(server) as http,
    ):
        wait(http, interrupted, "running", min_steps=20)
        done_steps = steps(http, interrupted)  # it goes on meanwhile
        assert done_steps == list(range(1, len(done_steps) + 1))
        body = {"model": done["fine_tuned_model"], "prompt": "a", "max_tokens": 1}
        assert http.post("/v1/completions", json=body).status_code == 200
        assert wide not in [card["id"] for card in http.get("/v1/models").json()["data"]]
        answer = http.post("/v1/completions", json={**body, "model": wide})
        assert answer.status_code == 404
        assert "rank is 8, and this server serves none of more than 4" in answer.json()["error"]["message"]
        assert f"{wide} (rank 8)" in server.log
