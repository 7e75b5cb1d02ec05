"""A real server with a key and little room: who may come in, how many at once, and what a dying worker looks like."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

import serving
from online import figure
from undisturbed import until_undisturbed

KEY = "a secret key"
ORIGIN = "https://chat.example"
HEADERS = {"Authorization": f"Bearer {KEY}"}
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True}
MAX_QUEUE = 32
NUM_AT_ONCE = 200  # the pool of httpx takes a time that grows with the square of them


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.RunningServer]:
    flags = ("--max-queue", str(MAX_QUEUE), "--max-num-seqs", "8", "--allowed-origins", ORIGIN)
    with serving.running_server(
        tmp_path_factory.mktemp("limits") / "data", *flags, env={"COTENANT_API_KEY": KEY}
    ) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: serving.RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.base_url, timeout=120) as session:
        yield session


@pytest.mark.parametrize(
    "path",
    ["/v1/models", "/v1/models/tiny", "/v1/files", "/v1/fine_tuning/jobs", "/v1/nothing", "/tokenize", "/detokenize"],
)
def test_what_works_for_clients_needs_the_key(http: httpx.Client, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
        response = http.get(path, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        assert KEY not in response.text
    assert http.get(path, headers=HEADERS).status_code in (200, 404, 405)


def test_pages_of_an_allowed_origin_may_call_and_others_not(http: httpx.Client) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    for origin, is_allowed in ((ORIGIN, True), ("https://other.example", False)):
        before = http.options("/v1/chat/completions", headers={"Origin": origin, **asks})
        assert before.status_code == (200 if is_allowed else 400)
        for headers, status in ((HEADERS, 200), ({}, 401)):
            for more in ({}, {"stream": True}):
                body = {**BODY, "max_tokens": 2, **more}
                response = http.post("/v1/chat/completions", json=body, headers={"Origin": origin, **headers})
                assert response.status_code == status
                allowed = response.headers.get("access-control-allow-origin")
                assert allowed == (ORIGIN if is_allowed else None)
                assert "x-request-id" in response.headers["access-control-expose-headers"]


@pytest.mark.parametrize("path", ["/health", "/metrics", "/version"])
def test_probes_need_no_key(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 200


def test_the_openai_client_gets_its_own_errors(server: serving.RunningServer) -> None:
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="wrong").models.list()
    assert openai.OpenAI(base_url=f"{server.base_url}/v1", api_key=KEY).models.list().data[0].id == "tiny"


def test_one_request_cannot_ask_for_more_than_ever_fits(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json={**BODY, "n": MAX_QUEUE + 1}, headers=HEADERS)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"


def test_over_capacity_is_a_503_that_says_when_to_come_again(server: serving.RunningServer, http: httpx.Client) -> None:
    before = _num_refused(http)
    # The worker begins once somebody was refused: the queue is full however slowly they come.
    with ThreadPoolExecutor(1) as pool, server.stopped_worker():
        answers = pool.submit(asyncio.run, _all_at_once(server.base_url))
        while _num_refused(http) == before:
            assert not answers.done()
    responses = answers.result()
    counts = Counter(response.status_code for response in responses)
    assert _num_refused(http) - before == counts[503]
    assert set(counts) == {200, 503}
    assert counts[200] >= MAX_QUEUE
    for response in responses:
        if response.status_code == 503:
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "overloaded"
        else:
            assert response.json()["usage"]["completion_tokens"] == 24
    assert http.post("/v1/chat/completions", json={**BODY, "max_tokens": 2}, headers=HEADERS).status_code == 200


def _num_refused(http: httpx.Client) -> int:
    found = re.search(r'^cotenant:requests_refused_total{model_name="tiny"} (\d+)', http.get("/metrics").text, re.M)
    assert found is not None
    return int(found[1])


async def _all_at_once(base_url: str) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=NUM_AT_ONCE)
    async with httpx.AsyncClient(base_url=base_url, timeout=120, limits=limits, headers=HEADERS) as session:
        body = {**BODY, "max_tokens": 24}
        return await asyncio.gather(
            *(session.post("/v1/chat/completions", json=body) for _ in range(NUM_AT_ONCE))
        )  # fmt: skip


def test_a_stream_whose_worker_dies_ends_with_an_error_event(server: serving.RunningServer, http: httpx.Client) -> None:
    limit = http.get("/v1/models/tiny", headers=HEADERS).json()["max_model_len"] - 100
    body = {**BODY, "max_tokens": limit, "stream": True, "n": 8}

    def lost(_: int) -> str | None:
        events: list[str] = []
        end = len(server.log)
        with http.stream("POST", "/v1/chat/completions", json=body, headers=HEADERS) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if not line:
                    continue
                if len(events) == 20:
                    server.kill_worker()
                events.append(line.removeprefix("data: "))
        server.wait_ready()
        assert "the stream ended with an error" not in server.log
        if events[-1] == "[DONE]":
            return "the stream had come to its end before the worker died"
        error = json.loads(events[-1])["error"]
        assert error["code"] == "worker_lost"
        assert error["type"] == "server_error"
        assert all("error" not in json.loads(event) for event in events[:-1])
        (line,) = [line for line in server.log[end:].splitlines() if "cut off" in line]
        assert "WARNING" in line
        assert re.search(r"cut off [1-8] requests; [0-7] are to be run again", line)
        return None

    until_undisturbed(lost, num_runs=3)
    assert http.post("/v1/chat/completions", json={**BODY, "max_tokens": 2}, headers=HEADERS).status_code == 200


def test_answers_in_one_piece_survive_a_worker_and_the_log_says_so(
    server: serving.RunningServer, http: httpx.Client
) -> None:
    """Some of their tokens are here when it dies, and nobody has seen any."""
    limit = http.get("/v1/models/tiny", headers=HEADERS).json()["max_model_len"] - 100
    body = {**BODY, "max_tokens": limit, "n": 4, "seed": 1}

    def survived(_: int) -> str | None:
        end = len(server.log)
        before = figure(http, "generation_tokens_total")
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(http.post, "/v1/chat/completions", json=body, headers=HEADERS)
            while figure(http, "generation_tokens_total") < before + 40:
                assert not answer.done() or answer.result().status_code == 200
            server.kill_worker()
            assert answer.result().status_code == 200
        server.wait_ready()
        cut_off = re.findall("cut off .*", server.log[end:])
        if not cut_off:
            return "the answer was there before the worker died"
        assert cut_off == ["cut off 0 requests; 4 are to be run again"]
        return None

    until_undisturbed(survived, num_runs=3)
