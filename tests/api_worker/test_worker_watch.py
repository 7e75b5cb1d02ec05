"""A worker that is there and says nothing: noticed once, let be, and all right again when it goes on."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import time

import pytest

from api_worker import stand_in_worker as stand_in
from api_worker.clients import CONFIG, kill_worker, make_client, run, running, until
from cotenant.api.worker_client import WorkerClient
from cotenant.config import ServerConfig
from cotenant.core.request import Request, SamplingParams

SILENT, HEARD = "has said nothing for", "is heard again"


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def with_timeout(timeout_s: float) -> ServerConfig:
    return dataclasses.replace(CONFIG, api=dataclasses.replace(CONFIG.api, worker_timeout_s=timeout_s))


def send_signal(client: WorkerClient, number: signal.Signals) -> None:
    assert client.worker_pid is not None
    os.kill(client.worker_pid, number)


async def num_tokens_of_an_answer(client: WorkerClient) -> int:
    request = Request("r", (stand_in.COUNT, 9), SamplingParams(max_tokens=3), arrival_s=time.monotonic())
    return sum([len(output.token_ids) async for output in client.generate(request)])


def test_it_is_reported_once_and_serves_when_it_is_heard_again(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with running(make_client(config=with_timeout(1.0))) as client:
            assert client.serves
            pid = client.worker_pid
            send_signal(client, signal.SIGSTOP)
            await until(lambda: not client.serves)
            asked = asyncio.create_task(num_tokens_of_an_answer(client))
            await asyncio.sleep(0.5)
            assert not client.serves
            assert client.watch.silent_s >= 1.0
            assert not asked.done()
            send_signal(client, signal.SIGCONT)
            assert await asked == 3
            assert client.serves
            assert client.worker_pid == pid, "it is let be"
        assert caplog.text.count(SILENT) == 1
        assert f"process {pid}, {SILENT} 1 s" in caplog.text
        assert caplog.text.count(HEARD) == 1

    run(scenario)


def test_another_takes_the_place_of_one_that_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with running(make_client(config=with_timeout(1.0))) as client:
            send_signal(client, signal.SIGSTOP)
            await until(lambda: not client.serves)
            await kill_worker(client)
            await until(lambda: client.serves)
            assert await num_tokens_of_an_answer(client) == 3
        assert caplog.text.count(SILENT) == 1
        assert HEARD not in caplog.text

    run(scenario)


def test_a_pause_of_this_process_is_not_the_workers(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with running(make_client(config=with_timeout(2.0))) as client:
            send_signal(client, signal.SIGSTOP)
            time.sleep(2.5)  # nothing of this process's loop runs
            send_signal(client, signal.SIGCONT)
            await asyncio.sleep(0.5)
            assert client.serves
        assert SILENT not in caplog.text

    run(scenario)


@pytest.mark.parametrize(("start", "timeout_s"), [("slow", 0.1), ("ready", 0.0)])
def test_nobody_is_missed_who_is_being_loaded_or_if_none_shall_be(
    start: str, timeout_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with running(make_client(start, with_timeout(timeout_s)), ready=start == "ready") as client:
            await until(lambda: client.worker_pid is not None)
            send_signal(client, signal.SIGSTOP)
            await asyncio.sleep(0.5)
            assert client.serves == (start == "ready")
        assert SILENT not in caplog.text

    run(scenario)
