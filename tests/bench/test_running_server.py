"""A server that is started to be measured does not outlive who started it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

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
