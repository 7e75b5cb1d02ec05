"""Clients of a stand-in worker, and an event loop to run them in."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import uvloop

from api_worker import stand_in_worker as stand_in
from cotenant.api.supervisor import CrashWindow
from cotenant.api.worker_client import WorkerClient
from cotenant.config import ApiConfig, BatchConfig, ModelConfig, ServerConfig

CONFIG = ServerConfig(ModelConfig("tiny"), batch=BatchConfig(max_queue=4), api=ApiConfig(api_key="secret"))


def make_client(
    start: str = "ready", config: ServerConfig = CONFIG, crashes: CrashWindow | None = None
) -> WorkerClient:
    command = (sys.executable, stand_in.__file__, start)
    return WorkerClient(config, worker_command=command, crashes=crashes or CrashWindow(first_delay_s=0.01))


@asynccontextmanager
async def running(client: WorkerClient, ready: bool = True) -> AsyncIterator[WorkerClient]:
    await client.start()
    try:
        if ready:
            await asyncio.wait_for(client.wait_ready(), 60)
        yield client
    finally:
        await client.close()


async def until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the server's loop
        runner.run(asyncio.wait_for(scenario(), 240))  # type: ignore[arg-type]


async def kill_worker(client: WorkerClient) -> None:
    pid = client.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: client.ready is None)
