"""What tests of a running server ask it again and again."""

from __future__ import annotations

import time
from typing import Any

import httpx

MODEL = "tiny"
MESSAGES: Any = [{"role": "user", "content": "Hello, who are you?"}]


def max_model_len(http: httpx.Client) -> int:
    return int(http.get(f"/v1/models/{MODEL}").json()["max_model_len"])


def figure(http: httpx.Client, name: str) -> float:
    """The sum of a metric over its labels."""
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"cotenant:{name}{{"))


def wait_until_idle(http: httpx.Client, within_s: float) -> None:
    deadline_s = time.monotonic() + within_s
    while figure(http, "num_requests_live") or figure(http, "num_requests_running"):
        assert time.monotonic() < deadline_s, "a sequence is still live"
        time.sleep(0.02)


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    error: dict[str, Any] = body["error"]
    return error
