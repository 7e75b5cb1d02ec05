"""A real server whose worker hangs for a while: a stopped process stands for it."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx

from cli.served import FLAGS, body, client_of, wait_until
from online import figure_in
from serving import RunningServer, running_server


def is_ready(server: RunningServer) -> float:
    return figure_in(httpx.get(f"{server.base_url}/metrics", timeout=60).text, "model_ready")


def test_a_worker_that_hangs_is_reported_and_answers_when_it_goes_on(tmp_path: Path) -> None:
    answers: list[httpx.Response] = []

    def ask() -> None:
        with client_of(server) as client:
            answers.append(client.post("/v1/completions", json=body(4)))

    with running_server(tmp_path / "data", *FLAGS, "--worker-timeout", "2") as server:
        assert is_ready(server) == 1
        asking = threading.Thread(target=ask)
        with server.stopped_worker() as pid:
            asking.start()
            wait_until(lambda: not server.is_healthy())
            refusal = httpx.get(f"{server.base_url}/health", timeout=60)
            assert refusal.status_code == 503
            assert "retry-after" in refusal.headers
            error = refusal.json()["error"]
            assert (error["type"], error["code"]) == ("server_error", "worker_silent")
            assert "has said nothing for 2 s" in error["message"]
            assert is_ready(server) == 0
            assert not answers
        asking.join(60)
        assert answers[0].status_code == 200
        server.wait_ready(10)
        assert is_ready(server) == 1
        lines = [line for line in server.log.splitlines() if f"process {pid}" in line]
        assert ["has said nothing for 2 s" in line for line in lines] == [True, False]
        assert f"kill -KILL {pid}" in lines[0]
        assert "is heard again" in lines[1]
        assert server.stop() == 0
