"""How a real server ends: by signals, with streams and clients that do not go on, and when it is killed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import time
from datetime import datetime, timedelta
from pathlib import Path

import httpx
import pytest

from cli.served import FLAGS, Stream, body, wait_until
from serving import RunningServer, running_server, start_server, wait_gone
from undisturbed import until_undisturbed


def test_a_hangup_lets_running_streams_end(tmp_path: Path) -> None:
    """As SIGTERM does. The shell and the kernel send it both, and the kernel to all processes."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored, as under nohup, it would be by the server as well
    try:
        _hang_up(tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)


def _hang_up(tmp_path: Path) -> None:
    with running_server(tmp_path / "data", *FLAGS) as server:
        stream = Stream(server, max_tokens=900)
        stream.wait_first()
        worker_pid = server.worker_pid()
        assert worker_pid is not None
        for pid in (server.process.pid, worker_pid):
            os.kill(pid, signal.SIGHUP)
        wait_until(lambda: not server.is_healthy())
        server.process.send_signal(signal.SIGHUP)
        stream.join()
        assert stream.error is None
        assert stream.events[-1] == "[DONE]"
        assert server.wait_exit() == 0
        assert "Traceback" not in server.log


def test_the_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with running_server(tmp_path / "data", *FLAGS) as server:
        worker_pid = server.worker_pid()
        assert worker_pid is not None
        stream = Stream(server, max_tokens=1000)
        stream.wait_first()
        os.kill(worker_pid, signal.SIGSTOP)  # so that the first signal alone could not end it
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: "draining" in server.log)
        server.process.send_signal(signal.SIGINT)
        assert server.wait_exit(10) == 128 + signal.SIGINT
        assert re.search(r"WARNING .*: SIGINT again: stopping at once; 1 requests are cut off$", server.log, re.M)
        wait_gone(worker_pid)


def test_sigterm_while_the_model_is_loaded_ends_it_soon(tmp_path: Path) -> None:
    def stopped(attempt: int) -> str | None:
        with running_server(tmp_path / f"data-{attempt}", wait=False) as server:
            wait_until(lambda: "listening on" in server.log)
            status = httpx.get(f"{server.base_url}/health", timeout=60).status_code
            began_s = time.monotonic()
            assert server.stop() == 0
            took_s = time.monotonic() - began_s
            assert server.worker_pid() is None
        return None if status == 503 and took_s < 10 else f"/health had said {status}, and it took {took_s:.1f} s"

    until_undisturbed(stopped)


UPLOAD = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\nkept\r\n--b--\r\n'
)


def begin(server: RunningServer, method: str, path: str, kind: str, num_bytes: int, content: bytes) -> socket.socket:
    """A connection that has sent a request's head and ``content`` of its ``num_bytes``, and reads next to nothing."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {num_bytes}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def test_who_has_connected_before_sigterm_is_answered_and_not_reset(tmp_path: Path) -> None:
    content = json.dumps(body(2)).encode()
    with contextlib.ExitStack() as stack, running_server(tmp_path / "data", *FLAGS) as server:
        server.process.send_signal(signal.SIGSTOP)  # so that the kernel alone takes connections
        request = ("POST", "/v1/completions", "application/json", len(content), content)
        connections = [stack.enter_context(begin(server, *request)) for _ in range(100)]
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGCONT)
        answers = [connection.makefile("rb").read() for connection in connections]
        assert {answer[:12] for answer in answers} <= {b"HTTP/1.1 200", b"HTTP/1.1 503"}
        refused = [answer for answer in answers if b"shutting_down" in answer]
        assert refused
        assert all(b"\r\nretry-after:" in answer for answer in refused)
        assert server.wait_exit() == 0
        assert "cut" not in server.log


def test_clients_that_do_not_go_on_hold_a_drained_server_for_seconds(tmp_path: Path) -> None:
    """An upload and a request that do not end, and an answer that is not read; what ends meanwhile is kept."""
    form = "multipart/form-data; boundary=b"
    with contextlib.ExitStack() as stack, running_server(tmp_path / "data", *FLAGS) as server:
        file = {"file": ("large.txt", b"x" * (32 << 20))}
        large = httpx.post(f"{server.base_url}/v1/files", files=file, data={"purpose": "user_data"}, timeout=60)
        content_path = f"/v1/files/{large.json()['id']}/content"
        stack.enter_context(begin(server, "POST", "/v1/files", form, 10_000, UPLOAD[:-8]))
        stack.enter_context(begin(server, "POST", "/v1/completions", "application/json", 10_000, b"{"))
        unread = stack.enter_context(begin(server, "GET", content_path, "text/plain", 0, b""))
        assert unread.recv(12) == b"HTTP/1.1 200"
        late = stack.enter_context(begin(server, "POST", "/v1/files", form, len(UPLOAD), UPLOAD[:-8]))
        wait_until(lambda: len(list((server.data_dir / "files").iterdir())) == 3)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "drained" in server.log)
        late.sendall(UPLOAD[-8:])
        assert late.recv(12) == b"HTTP/1.1 200"
        assert server.wait_exit() == 0
        assert "cut 3 connections" in server.log
        assert "Traceback" not in server.log
        assert sorted(path.stat().st_size for path in (server.data_dir / "files").iterdir()) == [4, 32 << 20]


def test_a_signal_ends_a_server_that_lost_its_worker_and_waits_for_a_client(tmp_path: Path) -> None:
    with running_server(tmp_path / "data", *FLAGS) as server:
        stalled = begin(server, "POST", "/v1/completions", "application/json", 10_000, b"{")

        def has_given_up() -> bool:
            pid = server.worker_pid()
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return "5 times within 60 s" in server.log

        with stalled:
            wait_until(has_given_up)
            assert server.stop() == 1
        # Not after as long as a client is waited for that nobody is in a hurry for.
        assert logged_at(server, "cut 1 connection ") - logged_at(server, "SIGTERM: stopping") < timedelta(seconds=5)


def logged_at(server: RunningServer, text: str) -> datetime:
    (line,) = (line for line in server.log.splitlines() if text in line)
    return datetime.strptime(" ".join(line.split()[:2]), "%Y-%m-%d %H:%M:%S,%f")


@pytest.mark.parametrize("moment", ["starting", "ready"])
def test_the_worker_dies_with_a_killed_server(moment: str, tmp_path: Path) -> None:
    with running_server(tmp_path / "data", *FLAGS, wait=moment == "ready") as server:
        wait_until(lambda: server.worker_pid() is not None)
        worker_pid = server.worker_pid()
        assert worker_pid is not None
        os.kill(server.process.pid, signal.SIGKILL)
        wait_gone(worker_pid, 10)


def test_a_server_waits_for_the_worker_of_one_that_was_killed(tmp_path: Path) -> None:
    """This process stands where a worker is that takes its time to end."""
    with running_server(tmp_path / "data", *FLAGS) as killed:
        worker_pid = killed.worker_pid()
    path = tmp_path / "data" / "WORKER"
    assert path.read_text() == f"{worker_pid}\n"
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        server = start_server(tmp_path / "data", *FLAGS, wait=False)
        try:
            told = f"waiting for the worker of a server that was killed, process {worker_pid}, to end"
            wait_until(lambda: told in server.log)
            assert not server.is_healthy()
            fcntl.flock(held, fcntl.LOCK_UN)
            server.wait_ready()
            assert server.stop() == 0
        finally:
            server.kill()
