"""How a server with a key and small limits refuses what is wrong: what its tests share."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from typing import Any

import httpx

from online import MESSAGES, MODEL, error_of
from serving import RunningServer

KEY = "sk-right"
HEADERS = {"Authorization": f"Bearer {KEY}"}
MAX_UPLOAD_BYTES = 1 << 20
FLAGS = ("--api-key", KEY, "--max-upload-bytes", str(MAX_UPLOAD_BYTES))

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
FILES = "/v1/files"
JOBS = "/v1/fine_tuning/jobs"

# What a client must never see: paths of ours, names of Python's errors, words of the database.
_INSIDE = ("Traceback", "cotenant/", '.py"', "Error:", "sqlite", "SQLite", "SELECT")


def assert_refused(response: httpx.Response, status: int, param: str | None, code: str | None, *words: str) -> None:
    """An error in OpenAI's shape whose message holds ``words`` and is no longer than a person reads."""
    assert response.status_code == status, response.text
    error = error_of(response)
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert (error["param"], error["code"]) == (param, code)
    assert len(error["message"]) < 1500
    for word in words:
        assert word in error["message"]
    for word in _INSIDE:
        assert word not in response.text


def greedy_answer(client: httpx.Client) -> str:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16, "temperature": 0}
    response = client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def request_as_written(
    server: RunningServer, method: str, path: str, headers: dict[str, str] | None = None
) -> httpx.Response:
    """The answer to a request whose path goes over the wire as it is; other clients tidy ``..`` away."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request(method, path, headers=HEADERS if headers is None else headers)
        response = connection.getresponse()
        return httpx.Response(response.status, headers=response.getheaders(), content=response.read())
    finally:
        connection.close()


def stored(server: RunningServer) -> set[str]:
    """The names in the folder of uploads, temporary ones included."""
    return {path.name for path in (server.data_dir / "files").iterdir()}


def upload(client: httpx.Client, content: bytes, purpose: str = "fine-tune", name: str = "train.jsonl") -> str:
    answer = client.post(FILES, files={"file": (name, content)}, data={"purpose": purpose})
    assert answer.status_code == 200, answer.text
    file_id: str = answer.json()["id"]
    return file_id


def create_job(client: httpx.Client, **fields: Any) -> str:
    answer = client.post(JOBS, json={"model": MODEL, **fields})
    assert answer.status_code == 200, answer.text
    job_id: str = answer.json()["id"]
    return job_id


def hyperparameters(**values: Any) -> dict[str, Any]:
    return {"method": {"type": "supervised", "supervised": {"hyperparameters": values}}}


def wait_until(condition: Callable[[], object], timeout_s: float = 60) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)


def wait_for(client: httpx.Client, job_id: str, status: str) -> dict[str, Any]:
    job: dict[str, Any] = {}

    def reached() -> bool:
        job.update(client.get(f"{JOBS}/{job_id}").json())
        assert job["status"] == status or job["status"] not in ("failed", "succeeded", "cancelled"), job
        return bool(job["status"] == status)

    wait_until(reached, timeout_s=120)
    return job
