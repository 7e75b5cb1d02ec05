"""Open-loop load: requests are sent at their times whether or not earlier ones were answered."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import httpx
import msgspec

from cotenant.bench.summary import RequestResult

_DATA = b"data: "


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    """The parts of a streamed chat chunk that a measurement needs."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, object] | None = None


_CHUNK = msgspec.json.Decoder(_Chunk)


@dataclass(frozen=True, slots=True)
class ChatLoad:
    """Poisson arrivals of chat requests, the same ones for the same seed."""

    model: str
    prompts: Sequence[str]
    rate_per_s: float
    max_tokens: int
    seed: int = 0


def arrival_times(rate_per_s: float, duration_s: float, seed: int) -> list[float]:
    """Seconds from the start at which requests are sent: a Poisson process of this rate."""
    rng = random.Random(seed)
    times: list[float] = []
    now = rng.expovariate(rate_per_s)
    while now < duration_s:
        times.append(now)
        now += rng.expovariate(rate_per_s)
    return times


async def run_load(
    client: httpx.AsyncClient,
    load: ChatLoad,
    duration_s: float,
    *,
    on_result: Callable[[RequestResult], None],
    stop: asyncio.Event | None = None,
) -> list[RequestResult]:
    """Send the load for ``duration_s``, or until ``stop`` is set, and wait for all that was sent.

    ``lag_ms`` of a result tells how late the generator itself was: a large one means that it, not the server, was
    the limit.
    """
    rng = random.Random(load.seed + 1)
    start = time.perf_counter()
    results: list[RequestResult] = []

    async def one(prompt: str, due_s: float, seed: int) -> None:
        result = await send_chat(client, load.model, prompt, load.max_tokens, due_s, start, seed)
        results.append(result)
        on_result(result)

    async with asyncio.TaskGroup() as group:
        for index, due_s in enumerate(arrival_times(load.rate_per_s, duration_s, load.seed)):
            await _sleep_until(start + due_s, stop)
            if stop is not None and stop.is_set():
                break
            group.create_task(one(rng.choice(load.prompts), due_s, index))
    return results


async def _sleep_until(when: float, stop: asyncio.Event | None) -> None:
    delay = when - time.perf_counter()
    if delay <= 0:
        return
    if stop is None:
        await asyncio.sleep(delay)
        return
    try:
        await asyncio.wait_for(stop.wait(), delay)
    except TimeoutError:
        return


async def send_chat(
    client: httpx.AsyncClient, model: str, prompt: str, max_tokens: int, due_s: float, origin: float, seed: int
) -> RequestResult:
    """One streamed chat request, timed from the moment it is sent. ``origin`` is the clock's zero of ``due_s``."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0.7,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent = time.perf_counter()
    lag_ms = max(0.0, (sent - origin - due_s) * 1e3)
    first = last = sent
    num_tokens = 0
    error: str | None = None
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                error = f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')[:200]}"
            else:
                async for line in _data_lines(response):
                    chunk = _CHUNK.decode(line)
                    if chunk.error is not None:
                        error = str(chunk.error.get("message"))
                    if chunk.usage is not None:
                        num_tokens = chunk.usage.completion_tokens
                    # The token that ends an answer has no text, but it is counted, and the client waits for it.
                    if any(choice.delta.content or choice.finish_reason for choice in chunk.choices):
                        last = time.perf_counter()
                        first = last if first == sent else first
    except (httpx.HTTPError, msgspec.DecodeError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    if error is None and num_tokens == 0:
        error = "the answer had no tokens"
    tpot_ms = (last - first) * 1e3 / (num_tokens - 1) if num_tokens > 1 else 0.0
    return RequestResult(sent - origin, (first - sent) * 1e3, tpot_ms, (last - sent) * 1e3, num_tokens, lag_ms, error)


async def _data_lines(response: httpx.Response) -> AsyncIterator[bytes]:
    buffer = b""
    async for piece in response.aiter_raw():
        buffer += piece
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            if line.startswith(_DATA) and not line.startswith(b"data: [DONE]"):
                yield line[len(_DATA) :]
