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
    return figure_in(http.get("/metrics").text, name)


def figure_in(metrics: str, name: str) -> float:
    """The same in what /metrics has said."""
    lines = metrics.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"cotenant:{name}{{"))


def wait_until_idle(http: httpx.Client, within_s: float) -> str:
    """What /metrics says once nothing is live: the worker's figures are of one moment."""
    deadline_s = time.monotonic() + within_s
    while True:
        metrics = http.get("/metrics").text
        if not any(figure_in(metrics, f"num_requests_{state}") for state in ("live", "running", "waiting")):
            return metrics
        assert time.monotonic() < deadline_s, "a sequence is still live"
        time.sleep(0.02)


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    error: dict[str, Any] = body["error"]
    return error
