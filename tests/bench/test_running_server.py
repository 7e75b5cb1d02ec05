"""A server that is started to be measured does not outlive who started it, and is not waited for once it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from cotenant.api.server import open_listener
from cotenant.bench.client import ServerError, new_client, wait_healthy
from cotenant.bench.server import free_port, running_server
from cotenant.config import ApiConfig

STARTER = """
import sys, time
from pathlib import Path
from cotenant.bench.server import running_server

with running_server("tiny", ["--data-dir", sys.argv[1]], Path(sys.argv[1] + ".log")):
    print("started", flush=True)
    time.sleep(100)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone kills a process when its parent ends")
def test_a_server_is_gone_when_its_starter_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTER, str(tmp_path / "data")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == "started\n"
        (server,) = psutil.Process(starter.pid).children()
        assert "serve" in server.cmdline()
        starter.kill()
    _, alive = psutil.wait_procs([server], timeout=10)
    for each in alive:
        each.kill()
    assert not alive


def test_a_server_that_ends_at_its_start_is_told_of_at_once(tmp_path: Path) -> None:
    async def wait(url: str, has_ended: Callable[[], bool]) -> None:
        async with new_client(url) as client:
            await wait_healthy(client, 200.0, has_ended)

    log = tmp_path / "server.log"
    with (
        pytest.raises(ServerError, match=rf"(?s)ended before it was healthy.*ended with code 2; see {log}"),
        running_server("tiny", ["--data-dir", str(tmp_path / "data"), "--policy", "none-such"], log) as server,
    ):
        asyncio.run(asyncio.wait_for(wait(server.url, server.has_ended), 100.0))
    assert "--policy: must be one of" in log.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port that is held may be given to others, too")
def test_a_port_is_nobody_elses_until_the_server_listens() -> None:
    """As of two servers that are started at once: whoever asks for any port meanwhile has another one."""
    ports = {free_port() for _ in range(20)}
    with contextlib.ExitStack() as stack:
        others = set()
        for _ in range(400):
            other = stack.enter_context(socket.socket())
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", 0))
            others.add(other.getsockname()[1])
        assert not ports & others
    for port in ports:
        with socket.socket() as taken, pytest.raises(OSError, match="Address already in use"):
            taken.bind(("127.0.0.1", port))
        with contextlib.closing(open_listener(ApiConfig(port=port))) as listener:
            assert listener.getsockname() == ("127.0.0.1", port)
