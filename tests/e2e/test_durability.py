"""Kill either process at any moment: nothing is lost, and the job ends with the bits of a run without the kill."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving import RunningServer, start_server

HYPERPARAMETERS = {
    "max_steps": 48,
    "batch_size": 4,
    "save_steps": 7,
    "learning_rate": 1e-3,
    "r": 4,
    "lora_dropout": 0.1,
}


def training_file(folder: Path) -> Path:
    path = folder / "train.jsonl"
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Tell me about place {number}."},
                {"role": "assistant", "content": "It is " + "very " * (number % 7) + f"far, {number} days by boat."},
            ]
        }
        for number in range(30)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def create_job(server: RunningServer, path: Path) -> dict[str, Any]:
    with httpx.Client(base_url=server.base_url, timeout=30) as client:
        upload = client.post("/v1/files", files={"file": path.open("rb")}, data={"purpose": "fine-tune"}).json()
        validation = client.post("/v1/files", files={"file": path.open("rb")}, data={"purpose": "fine-tune"}).json()
        body = {
            "model": "tiny",
            "training_file": upload["id"],
            "validation_file": validation["id"],
            "seed": 11,
            "method": {"type": "supervised", "supervised": {"hyperparameters": HYPERPARAMETERS}},
        }
        answer = client.post("/v1/fine_tuning/jobs", json=body)
        assert answer.status_code == 200, answer.text
        job: dict[str, Any] = answer.json()
        return job


def get(server: RunningServer, path: str, **params: Any) -> Any:
    response = httpx.get(f"{server.base_url}{path}", params=params, timeout=30, verify=False)  # as in serving.py
    assert response.status_code == 200, response.text
    return response.json()


def all_events(server: RunningServer, job_id: str) -> list[dict[str, Any]]:
    return list(get(server, f"/v1/fine_tuning/jobs/{job_id}/events", limit=1000)["data"])


def wait_succeeded(server: RunningServer, job_id: str, timeout_s: float = 120) -> dict[str, Any]:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        job: dict[str, Any] = get(server, f"/v1/fine_tuning/jobs/{job_id}")
        if job["status"] == "succeeded":
            return job
        assert job["status"] in ("validating_files", "queued", "running"), job
        time.sleep(0.1)
    raise AssertionError(f"the job did not end in {timeout_s:g} s:\n{server.log[-3000:]}")


def adapter_bytes(server: RunningServer, job: dict[str, Any]) -> bytes:
    cards = {card["id"]: card for card in get(server, "/v1/models")["data"]}
    return (Path(cards[job["fine_tuned_model"]]["root"]) / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("undisturbed")
    server = start_server(folder / "data")
    try:
        job = wait_succeeded(server, create_job(server, training_file(folder))["id"])
        return adapter_bytes(server, job)
    finally:
        server.kill()


def test_killed_at_random_moments(tmp_path: Path, undisturbed: bytes) -> None:
    """Three kills each of the worker and of the API process, then the same adapter, all events, all files."""
    rng = random.Random(1)
    server = start_server(tmp_path / "data")
    seen: dict[str, str] = {}
    try:
        job = create_job(server, training_file(tmp_path))
        for kill_api in rng.sample([True, False] * 3, 6):
            time.sleep(rng.uniform(0.0, 1.2))
            seen |= {event["id"]: event["message"] for event in all_events(server, job["id"])}
            if kill_api:
                server.kill()
                server = start_server(tmp_path / "data")
            else:
                if server.worker_pid() is not None:
                    server.kill_worker()
                server.wait_ready()
        job = wait_succeeded(server, job["id"])
        events = {event["id"]: event for event in all_events(server, job["id"])}
        assert seen.items() <= {key: event["message"] for key, event in events.items()}.items(), "an event was lost"
        steps = sorted(event["data"]["step"] for event in events.values() if event["type"] == "metrics")
        assert steps == list(range(1, 49))
        assert adapter_bytes(server, job) == undisturbed
        assert len(get(server, "/v1/files")["data"]) == 3  # training, validation, result
        checkpoints = get(server, f"/v1/fine_tuning/jobs/{job['id']}/checkpoints", limit=100)["data"]
        assert {7, 14, 42, 48} <= {checkpoint["step_number"] for checkpoint in checkpoints}
    finally:
        server.kill()


def test_sigterm_drains_and_the_job_goes_on_where_it_was(tmp_path: Path, undisturbed: bytes) -> None:
    server = start_server(tmp_path / "data")
    try:
        job = create_job(server, training_file(tmp_path))
        while not any(event["type"] == "metrics" for event in all_events(server, job["id"])):
            time.sleep(0.05)
        assert server.stop() == 0
        checkpoints = list((tmp_path / "data" / "jobs" / job["id"] / "checkpoints").glob("step-*"))
        assert checkpoints, "the drain left no checkpoint"
        server = start_server(tmp_path / "data")
        assert adapter_bytes(server, wait_succeeded(server, job["id"])) == undisturbed
    finally:
        server.kill()
