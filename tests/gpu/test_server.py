"""A server on the GPU with the shapes of an 8B model: it serves, trains beside requests, and ends with an adapter."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors

from serving import RunningServer, start_server

_ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"question {number} " + "of some length " * 20},
            {"role": "assistant", "content": f"answer {number} " + "that is longer " * 40},
        ]
    }
    for number in range(32)
]


def _chat(client: httpx.Client, model: str, text: str, max_tokens: int) -> dict[str, Any]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def _begin(client: httpx.Client, model: str, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    path = folder / "train.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in _ROWS), encoding="utf-8")
    file_id = client.post("/v1/files", files={"file": path.open("rb")}, data={"purpose": "fine-tune"}).json()["id"]
    method = {"type": "supervised", "supervised": {"hyperparameters": settings}}
    response = client.post("/v1/fine_tuning/jobs", json={"model": model, "training_file": file_id, "method": method})
    assert response.status_code == 200, response.text
    job: dict[str, Any] = response.json()
    return job


def _ended(client: httpx.Client, job: dict[str, Any]) -> dict[str, Any]:
    deadline_s = time.monotonic() + 240
    while job["status"] not in ("succeeded", "failed", "cancelled") and time.monotonic() < deadline_s:
        time.sleep(0.5)
        job = client.get(f"/v1/fine_tuning/jobs/{job['id']}").json()
    return job


@pytest.mark.timeout(300)
def test_a_job_whose_loss_is_lost_fails_alone(tmp_path: Path) -> None:
    server = start_server(tmp_path / "data", model="tiny", wait=False)
    try:
        server.wait_ready(200)
        with httpx.Client(base_url=server.base_url, timeout=120) as client:
            before = _chat(client, "tiny", "hello", 8)["choices"]
            settings = {"learning_rate": 1e6, "warmup_steps": 1, "save_steps": 1, "n_epochs": 20, "batch_size": 4}
            job = _ended(client, _begin(client, "tiny", settings, tmp_path))
            assert job["status"] == "failed", job
            message = job["error"]["message"]
            found = re.search(r"The loss is not finite at step (\d+)", message)
            assert found is not None, message
            saved = client.get(f"/v1/fine_tuning/jobs/{job['id']}/checkpoints").json()["data"]
            # The weights that gave no finite loss are withdrawn; where a gradient was lost, they are good.
            newest = int(found[1]) - (1 if "judged by its gradient" in message else 2)
            assert [checkpoint["step_number"] for checkpoint in saved] == list(range(newest, 0, -1))
            assert _chat(client, "tiny", "hello", 8)["choices"] == before
    finally:
        server.kill()


@pytest.mark.timeout(540)
@pytest.mark.parametrize("sharing", [("--policy", "multitask", "--fuse"), ("--policy", "multitask", "--no-fuse"), ()])
def test_llama_8b_shapes_serve_and_train(tmp_path: Path, sharing: tuple[str, ...]) -> None:
    flags = ["--load-format", "dummy", "--max-model-len", "4096", "--max-num-seqs", "32", "--tasklet-tokens", "1024"]
    server = start_server(tmp_path / "data", *flags, *sharing, model="llama-3.1-8b", wait=False)
    try:
        server.wait_ready(300)
        with httpx.Client(base_url=server.base_url, timeout=120) as client:
            _serve_and_train(server, client, tmp_path)
    finally:
        server.kill()


def _serve_and_train(server: RunningServer, client: httpx.Client, folder: Path) -> None:
    alone = _chat(client, "llama-3.1-8b", "hello", 32)["choices"][0]["message"]["content"]
    settings = {"max_steps": 12, "batch_size": 4, "learning_rate": 1e-4, "r": 16}
    job = _begin(client, "llama-3.1-8b", settings, folder)
    answers: list[str] = []
    done = threading.Event()

    def keep_asking() -> None:
        with httpx.Client(base_url=server.base_url, timeout=120) as other:
            while not done.is_set():
                answers.append(_chat(other, "llama-3.1-8b", "hello", 32)["choices"][0]["message"]["content"])

    asker = threading.Thread(target=keep_asking)
    asker.start()
    try:
        job = _ended(client, job)
    finally:
        done.set()
        asker.join()
    assert job["status"] == "succeeded", (job, server.log[-3000:])
    cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    with safetensors.safe_open(
        Path(cards[job["fine_tuned_model"]]["root"]) / "adapter_model.safetensors", framework="pt"
    ) as adapter:
        assert len(adapter.keys()) == 32 * 7 * 2
    assert len(answers) > 3, "nothing was served beside the job"
    assert _chat(client, job["fine_tuned_model"], "hello", 8)["usage"]["completion_tokens"] == 8
    wanted = (
        "slo_",
        "tasklets_total",
        "trained_tokens_total",
        "tokens_total",
        "busy_seconds_total",
        "iterations_total",
    )
    samples = client.get("/metrics").text.splitlines()
    print(
        *(line for line in samples if line.startswith("cotenant:") and any(name in line for name in wanted)), sep="\n"
    )
    # bf16 rounds by the shape of the batch, so beside the job an answer may differ late; it starts the same.
    assert all(answer[:4] == alone[:4] for answer in answers)
