"""What a benchmark asks of a server besides chat: health, files, jobs, metrics. Plain HTTP."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)", re.MULTILINE)


class ServerError(Exception):
    """The server answered with an error, or did not come up."""


def new_client(base_url: str) -> httpx.AsyncClient:
    """A client that never waits in a pool: every request gets a connection."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    return httpx.AsyncClient(base_url=base_url, timeout=httpx.Timeout(120.0), limits=limits, trust_env=False)


async def wait_healthy(
    client: httpx.AsyncClient, timeout_s: float, has_ended: Callable[[], bool] = lambda: False
) -> None:
    """Return once `/health` answers 200. Raises ServerError after ``timeout_s``, or as soon as the server
    ``has_ended``."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if has_ended():
            raise ServerError(f"the server at {client.base_url} ended before it was healthy")
        try:
            if (await client.get("/health")).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        await asyncio.sleep(0.1)
    raise ServerError(f"the server at {client.base_url} was not healthy within {timeout_s:.0f} s")


async def call(client: httpx.AsyncClient, method: str, path: str, **arguments: Any) -> dict[str, Any]:
    """One JSON call. Raises ServerError with the server's own message."""
    response = await client.request(method, path, **arguments)
    if response.status_code >= 400:
        raise ServerError(f"{method} {path}: HTTP {response.status_code}: {response.text[:500]}")
    answer: dict[str, Any] = response.json()
    return answer


async def upload(client: httpx.AsyncClient, path: Path) -> str:
    """Upload a training file; its id."""
    answer = await call(
        client, "POST", "/v1/files", files={"file": (path.name, path.read_bytes())}, data={"purpose": "fine-tune"}
    )
    return str(answer["id"])


async def ask(client: httpx.AsyncClient, model: str, question: str, max_tokens: int = 48) -> str:
    """The greedy answer of ``model`` to one question."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    answer = await call(client, "POST", "/v1/chat/completions", json=body)
    return str(answer["choices"][0]["message"]["content"]).strip()


async def metrics(client: httpx.AsyncClient) -> dict[str, float]:
    """Samples of `/metrics`, summed over labels, by name."""
    samples: dict[str, float] = {}
    for match in _SAMPLE.finditer((await client.get("/metrics")).text):
        samples[match["name"]] = samples.get(match["name"], 0.0) + float(match["value"])
    return samples


async def metric_by(client: httpx.AsyncClient, name: str, label: str) -> dict[str, float]:
    """The samples of one metric, summed over other labels, by the value of ``label``."""
    samples: dict[str, float] = {}
    for match in _SAMPLE.finditer((await client.get("/metrics")).text):
        value = re.search(rf'(?:^|,){label}="([^"]*)"', match["labels"] or "")
        if match["name"] == name and value is not None:
            samples[value[1]] = samples.get(value[1], 0.0) + float(match["value"])
    return samples


async def all_events(client: httpx.AsyncClient, job_id: str) -> list[dict[str, Any]]:
    """A job's events, oldest first."""
    events: list[dict[str, Any]] = []
    after: str | None = None
    while True:
        page = await call(
            client,
            "GET",
            f"/v1/fine_tuning/jobs/{job_id}/events",
            params={"limit": 100, **({"after": after} if after else {})},
        )
        events += page["data"]
        if not page.get("has_more"):
            return events[::-1]
        after = page["data"][-1]["id"]
