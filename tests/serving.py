"""A real server for tests: `cotenant serve` as its own process, on a free port, with its log in a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from cotenant.bench.server import free_port

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
_LOG_TAIL_CHARS = 4000


class ServerDied(AssertionError):  # noqa: N818 - it reads as the sentence that pytest prints
    """The server ended, or was not ready in time; the message holds the end of its log."""


@dataclass
class RunningServer:
    """A server process. ``process`` is the API process; the worker is its child."""

    process: subprocess.Popen[bytes]
    port: int
    data_dir: Path
    log_path: Path

    @property
    def base_url(self) -> str:
        """Without ``/v1``."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def worker_pid(self) -> int | None:
        """The worker's process id; None while there is none."""
        try:
            children = psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            return None
        for child in children:
            try:
                if "cotenant.runtime.worker" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    return child.pid
            except psutil.NoSuchProcess:
                continue
        return None

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until /health answers 200."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if self.process.poll() is not None:
                raise ServerDied(f"the server exited with code {self.process.returncode}:\n{self._log_tail()}")
            if self.is_healthy():
                return
            time.sleep(0.05)
        raise ServerDied(f"the server was not ready after {timeout_s:g} s:\n{self._log_tail()}")

    def is_healthy(self) -> bool:
        try:
            # Without verify=False each call reads all certificate authorities, which takes most of its time.
            return httpx.get(f"{self.base_url}/health", timeout=5, verify=False).status_code == 200
        except httpx.TransportError:
            return False

    def kill_worker(self) -> None:
        """SIGKILL the worker; returns when it is gone. The server starts another one."""
        pid = self.worker_pid()
        assert pid is not None, "there is no worker"
        worker = psutil.Process(pid)
        worker.kill()
        worker.wait(STOP_TIMEOUT_S)

    @contextmanager
    def stopped_worker(self) -> Iterator[int]:
        """Messages to the worker, whose process id this is, wait until its process is continued."""
        pid = self.worker_pid()
        assert pid is not None, "there is no worker"
        os.kill(pid, signal.SIGSTOP)
        try:
            yield pid
        finally:
            os.kill(pid, signal.SIGCONT)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """SIGTERM; returns the exit code when the server has drained."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait_exit(timeout_s)

    def wait_exit(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Wait until the API process ends by itself; returns its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerDied(f"the server had not ended after {timeout_s:g} s:\n{self._log_tail()}") from None

    def kill(self) -> None:
        """SIGKILL the API process; returns when it and its worker are gone."""
        worker_pid = self.worker_pid()
        self.process.kill()
        self.process.wait(STOP_TIMEOUT_S)
        if worker_pid is not None:
            wait_gone(worker_pid)

    def _log_tail(self) -> str:
        return self.log[-_LOG_TAIL_CHARS:]


def start_server(
    data_dir: Path,
    *flags: str,
    model: str = "tiny",
    wait: bool = True,
    env: Mapping[str, str] | None = None,
) -> RunningServer:
    """Start ``cotenant serve MODEL --data-dir DATA_DIR FLAGS…`` on a free port; with ``wait``, wait until it is ready.

    The caller stops it, or uses ``running_server``. ``env`` is added to this process's environment. The log lies beside
    the data folder and goes on when a server is started again on the same one.
    """
    data_dir.parent.mkdir(parents=True, exist_ok=True)
    log_path = data_dir.parent / f"{data_dir.name}.log"
    port = free_port()
    command = [sys.executable, "-m", "cotenant.cli.main", "serve", model, "--data-dir", str(data_dir)]
    inherited = {name: value for name, value in os.environ.items() if name != "COTENANT_API_KEY"}
    environment = {**inherited, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **(env or {})}
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port), *flags], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
    server = RunningServer(process, port, data_dir, log_path)
    if wait:
        try:
            server.wait_ready()
        except BaseException:
            server.kill()
            raise
    return server


@contextmanager
def running_server(data_dir: Path, *flags: str, **arguments: Any) -> Iterator[RunningServer]:
    """``start_server``, and at the end nothing of it is left."""
    server = start_server(data_dir, *flags, **arguments)
    try:
        yield server
    finally:
        server.kill()


def wait_gone(pid: int, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Wait until nothing of a process runs. One that outlived its parent stays listed until the first process of the
    machine looks after it, which may take seconds."""
    deadline_s = time.monotonic() + timeout_s
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1:
            assert time.monotonic() < deadline_s, f"process {pid} is still there after {timeout_s:g} s"
            time.sleep(0.005)
