"""A real server as its operator meets it: its start, its key, and a worker that is killed."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cli.served import FLAGS, Stream, body, client_of, wait_until
from online import figure_in
from serving import RunningServer, running_server, start_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server for the tests that leave it running."""
    folder = tmp_path_factory.mktemp("serve")
    with running_server(folder / "data", *FLAGS, env={"COTENANT_API_KEY": "open-sesame"}) as running:
        yield running


def test_the_ready_line_tells_where_and_what(server: RunningServer) -> None:
    """It comes once the server is healthy, which is what the fixture has waited for."""
    wait_until(lambda: re.search(r"^cotenant is ready: .*\n", server.log, re.MULTILINE))
    (line,) = re.findall(r"^cotenant is ready: .*\n", server.log, re.MULTILINE)
    assert server.base_url in line
    assert re.search(r"model tiny +policy adaptive +SLO TTFT 500\.0 ms TPOT 100\.0 ms ITL 300\.0 ms\n$", line)


def test_the_key_from_the_environment_guards_v1_only_and_reaches_no_log(server: RunningServer) -> None:
    assert httpx.get(f"{server.base_url}/v1/models", timeout=60).status_code == 401
    assert httpx.get(f"{server.base_url}/health", timeout=60).status_code == 200
    with client_of(server) as client:
        assert client.get("/v1/models").status_code == 200
    assert "open-sesame" not in server.log


def test_a_killed_worker_comes_back_and_only_a_started_stream_is_lost(server: RunningServer) -> None:
    for _ in range(3):
        before = counts(server)
        lost, answer = lose_worker(server)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 300
        server.wait_ready()
        num_prompt = answer.json()["usage"]["prompt_tokens"]
        assert [now - then for now, then in zip(counts(server), before, strict=True)] == [2, 2 * num_prompt, 2]
        if lost.events[-1] != "[DONE]":  # else the machine paused, and the stream had ended before
            break
    assert lost.events[-1] != "[DONE]"
    assert "error" in json.loads(lost.events[-1])


def counts(server: RunningServer) -> list[float]:
    """Requests that have ended, tokens of prompts that were begun, and first tokens."""
    metrics = httpx.get(f"{server.base_url}/metrics", timeout=60).text
    names = ("request_success_total", "prompt_tokens_total", "time_to_first_token_seconds_count")
    return [figure_in(metrics, name) for name in names]


def lose_worker(server: RunningServer) -> tuple[Stream, httpx.Response]:
    """Kill the worker while it streams: the stream at its end, and the answer to a request that had none by then."""
    num_begun = counts(server)[2]
    stream = Stream(server, max_tokens=900)
    stream.wait_first()
    answers: list[httpx.Response] = []

    def ask() -> None:
        with client_of(server) as client:
            answers.append(client.post("/v1/completions", json=body(300)))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: counts(server)[2] == num_begun + 2)  # both have begun
    server.kill_worker()
    stream.join()
    asking.join(60)
    return stream, answers[0]


def test_a_second_server_on_the_same_data_folder_is_refused(server: RunningServer) -> None:
    second = start_server(server.data_dir, wait=False)
    assert second.wait_exit() == 2
    said = second.log[second.log.rindex("error:") :]
    assert str(server.data_dir) in said
    assert server.is_healthy()


def test_decode_steps_that_lack_are_measured_before_anybody_asks(tmp_path: Path) -> None:
    """By the worker, once it has nothing to do."""
    flags = ("--self-profile", "--max-num-seqs", "2", "--max-model-len", "512")
    with running_server(tmp_path / "data", *flags) as server:
        wait_until(lambda: "decode steps of 2 shapes were measured in idle time" in server.log)
        metrics = httpx.get(f"{server.base_url}/metrics", timeout=60).text
        assert re.search(r"^cotenant:prefix_cache_queries_total\S* 0\.0$", metrics, re.MULTILINE)
        assert server.stop() == 0
    (path,) = (tmp_path / "data" / "latencies").iterdir()
    batches = [shape[1] for _, shape, *_ in json.loads(path.read_text())["records"] if shape[0] == "batch"]
    longest = {size: max(context for count, context, *_ in batches if count == size) for size in (1, 2)}
    assert longest[1] >= 256, "calibration's have 76 at most"
    assert longest[2] >= 512
