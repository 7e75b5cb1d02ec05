"""More requests at once than the server takes, and clients that leave: nobody waits for what nobody reads."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from e2e.refusals import CHAT, assert_refused, greedy_answer, wait_until
from online import MESSAGES, MODEL, figure, max_model_len
from serving import RunningServer, running_server
from undisturbed import until_undisturbed

NUM_AT_ONCE = 600
NUM_LEAVING = 120
MAX_QUEUE = 300
LIVE = ("num_requests_live", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("overload") / "data", "--max-queue", str(MAX_QUEUE)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.base_url, timeout=120) as session:
        yield session


def chat(max_tokens: int, **fields: Any) -> bytes:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": max_tokens, "ignore_eos": True, **fields}
    raw = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def is_idle(client: httpx.Client) -> bool:
    return not any(figure(client, name) for name in LIVE)


def wait_idle(client: httpx.Client) -> None:
    deadline_s = time.monotonic() + 60
    while not is_idle(client):
        assert time.monotonic() < deadline_s, {name: figure(client, name) for name in LIVE}
        time.sleep(0.02)


async def answer(port: int, request: bytes) -> httpx.Response:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        raw = await reader.read()
    finally:
        writer.close()
    head, _, body = raw.partition(b"\r\n\r\n")
    status, *headers = head.decode().split("\r\n")
    pairs = [tuple(header.split(": ", 1)) for header in headers]
    return httpx.Response(int(status.split()[1]), headers=pairs, content=body)  # type: ignore[arg-type]


async def all_at_once(port: int, requests: list[bytes]) -> list[httpx.Response]:
    return await asyncio.wait_for(asyncio.gather(*(answer(port, request) for request in requests)), 240)


def test_requests_beyond_capacity_are_told_when_to_come_again(server: RunningServer, client: httpx.Client) -> None:
    alone = client.post(
        CHAT, json={"model": MODEL, "messages": MESSAGES, "max_tokens": 32, "ignore_eos": True, "temperature": 0}
    ).json()["choices"]
    worker = server.worker_pid()
    refused_before = figure(client, "requests_refused_total")
    # The worker begins once somebody was refused: the queue is full however slowly they come.
    with ThreadPoolExecutor(1) as pool, server.stopped_worker():
        answers = pool.submit(asyncio.run, all_at_once(server.port, [chat(32, temperature=0)] * NUM_AT_ONCE))
        wait_until(lambda: figure(client, "requests_refused_total") > refused_before)
    responses = answers.result()

    counts = Counter(response.status_code for response in responses)
    assert set(counts) == {200, 503}
    assert counts[200] >= MAX_QUEUE
    for response in responses:
        if response.status_code == 200:
            assert response.json()["choices"] == alone
        else:
            assert_refused(response, 503, None, "overloaded", "limit", "try again")
            assert int(response.headers["retry-after"]) >= 1

    wait_idle(client)
    assert greedy_answer(client)
    assert server.worker_pid() == worker
    assert "Traceback" not in server.log


def test_one_request_cannot_ask_for_more_than_there_is_room_for(client: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": ["x"] * (MAX_QUEUE // 100 + 1), "n": 100}
    assert_refused(client.post("/v1/completions", json=body), 400, "n", "invalid_value", str(MAX_QUEUE))


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_leave_free_their_sequences_at_once(
    server: RunningServer, client: httpx.Client, stream: bool
) -> None:
    """Some of them run, the others still wait for the batch; none of the work is finished for nobody."""
    num_tokens = max_model_len(client) - 100

    async def come_and_go() -> None:
        request = chat(num_tokens, stream=stream)
        connections = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(NUM_LEAVING)]
        for _, writer in connections:
            writer.write(request)
        await asyncio.to_thread(wait_until, is_busy, 120)
        for _, writer in connections:
            writer.transport.abort()

    def is_busy() -> bool:
        return figure(client, "num_requests_live") == NUM_LEAVING and all(figure(client, name) for name in LIVE)

    def left(_: int) -> str | None:
        generated_before = figure(client, "generation_tokens_total")
        asyncio.run(come_and_go())
        left_s = time.monotonic()
        wait_idle(client)
        freed_s = time.monotonic() - left_s
        generated = figure(client, "generation_tokens_total") - generated_before
        assert 0 < generated < NUM_LEAVING * num_tokens / 4
        return None if freed_s < 5 else f"freed after {freed_s:.1f} s"

    until_undisturbed(left)
    assert greedy_answer(client)
    assert "Traceback" not in server.log


def test_a_client_that_leaves_does_not_take_others_along(server: RunningServer, client: httpx.Client) -> None:
    """One of two that share a batch goes; the other one's answer is what it is alone."""
    request = chat(200, temperature=0)
    alone = asyncio.run(answer(server.port, request)).json()["choices"]

    async def scenario() -> httpx.Response:
        leaving = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(8)]
        for _, writer in leaving:
            writer.write(chat(800, stream=True, temperature=0))
        for reader, _ in leaving:
            await reader.readuntil(b"data: ")  # it runs
        staying = asyncio.create_task(answer(server.port, request))
        for _, writer in leaving:
            await asyncio.sleep(0.05)
            writer.transport.abort()
        return await staying

    assert asyncio.run(scenario()).json()["choices"] == alone
    wait_idle(client)
