"""Every bad request is refused by name, in OpenAI's shape, and disturbs nobody: numbers, fields, prompts, ids, paths,
methods, sizes and keys. Files and jobs are in ``test_bad_training_input.py``."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from e2e.refusals import (
    CHAT,
    COMPLETIONS,
    FILES,
    JOBS,
    KEY,
    assert_refused,
    request_as_written,
    stored,
    upload,
)
from online import MESSAGES, MODEL, error_of, max_model_len
from serving import RunningServer

pytestmark = pytest.mark.usefixtures("undisturbed")

MAX_JSON_BYTES = 8 << 20
FUNCTION = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
NUMBERS = ("temperature", "top_p", "top_k", "min_p", "n", "seed", "max_tokens", "presence_penalty", "priority")


# Requests for completions.


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, JOBS, "/tokenize", "/detokenize"])
def test_malformed_json(client: httpx.Client, path: str) -> None:
    for raw in (b"", b"{", b'{"model": "tiny",}', b"\xff\xfe{}", b"\x1f\x8b\x08", b"[" * 100_000, b'{"a": "\\ud800"}'):
        assert_refused(client.post(path, content=raw), 400, None, "invalid_json", "JSON")
    for value in (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 5000, b"0x10", b"1.", b"True", b"'a'"):
        assert_refused(client.post(path, content=b'{"model": ' + value + b"}"), 400, None, "invalid_json", "JSON")
    for value in (b"[1]", b"null", b"7", b'"text"'):
        assert_refused(client.post(path, content=value), 400, None, "invalid_json", "must be a JSON object")


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_out_of_range_and_of_the_wrong_type(client: httpx.Client, name: str) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": MESSAGES}
    low = -(10**9) if name in ("priority", "seed") else -3
    bad: list[Any] = [1e308, -1e308, 2**70, -(2**70), int("9" * 400), "1", True, [1], {"a": 1}]
    bad += [] if name in ("seed", "priority") else [low]
    for value in bad:
        assert_refused(client.post(CHAT, json={**body, name: value}), 400, name, "invalid_value", f"'{name}'")


@pytest.mark.parametrize(
    ("fields", "param", "code", "says"),
    [
        ({"model": None}, "model", "missing_required_parameter", "Missing"),
        ({"model": 7}, "model", "invalid_value", "expected a string"),
        ({"messages": None}, "messages", "missing_required_parameter", "Missing"),
        ({"messages": []}, "messages", "invalid_value", "length >= 1"),
        ({"messages": "Hello"}, "messages", "invalid_value", "expected an array"),
        ({"messages": ["Hello"]}, "messages[0]", "invalid_value", "expected an object"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter", "missing"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value", "'robot'"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role", "invalid_value", "not one of"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter", "missing"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "invalid_value", "expected a string"),
        ({"messages": [{"role": "user", "content": [None]}]}, "messages[0].content[0]", "invalid_value", "object"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc"}}]}]},
            "messages[0].content[0]", "unsupported_parameter", "'image_url'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "messages[0].content[0]", "unsupported_parameter", "'input_audio'",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "cache_control": {"type": "x"}}]},
            "messages[0].cache_control", "unsupported_parameter", "not supported",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}]},
            "messages[0].tool_calls[0].function.name", "invalid_value", "expected a string",
        ),
        ({"stream": "yes"}, "stream", "invalid_value", "expected a boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value", "'stream'"),
        ({"stream": True, "stream_options": {"a": 1}}, "stream_options.a", "unknown_parameter", "stream_options.a"),
        ({"logprobs": 1}, "logprobs", "invalid_value", "expected a boolean"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value", "<= 20"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value", "'logprobs'"),
        ({"stop": ""}, "stop", "invalid_value", "length"),
        ({"stop": ["a"] * 17}, "stop", "invalid_value", "length <= 16"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids", "invalid_value", "vocabulary"),
        ({"logit_bias": {"Hello": 1}}, "logit_bias", "invalid_value", "'Hello'"),
        ({"logit_bias": {"05": 1, "5": 2}}, "logit_bias", "invalid_value", "'05'"),
        ({"logit_bias": {"10000000": 1}}, "logit_bias", "invalid_value", "vocabulary"),
        ({"logit_bias": {"1": 1e308}}, "logit_bias", "invalid_value", "<= 100"),
        ({"min_tokens": 5}, "min_tokens", "invalid_value", "max_tokens=4"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_value", "'messages'"),
        # What would change the answer and is not supported, or not known.
        ({"colour": "red"}, "colour", "unknown_parameter", "colour"),
        ({"x" * 10_000: 1}, "x" * 100, "unknown_parameter", "xxx"),
        ({"tools": [FUNCTION], "tool_choice": "required"}, "tools", "unsupported_parameter", "'tools'"),
        ({"tools": [FUNCTION]}, "tools", "unsupported_parameter", "'tool_choice'"),
        ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter", "'tool_choice'"),
        ({"tool_choice": FUNCTION}, "tool_choice", "unsupported_parameter", "'tool_choice'"),
        ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter", "'functions'"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter", "'response_format'"),
        ({"audio": {"voice": "alloy"}}, "audio", "unsupported_parameter", "'audio'"),
        ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter", "'modalities'"),
        ({"guided_json": {"type": "object"}}, "guided_json", "unsupported_parameter", "'guided_json'"),
        ({"web_search_options": {"a": 1}}, "web_search_options", "unsupported_parameter", "'web_search_options'"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter", "'reasoning_effort'"),
        ({"best_of": 4}, "best_of", "unsupported_parameter", "'best_of'"),
    ],
)  # fmt: skip
def test_bad_fields_of_a_chat(client: httpx.Client, fields: dict[str, Any], param: str, code: str, says: str) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, **fields}
    assert_refused(client.post(CHAT, json=body), 400, param, code, says)


@pytest.mark.parametrize(
    ("fields", "param", "code", "says"),
    [
        ({"prompt": None}, "prompt", "missing_required_parameter", "Missing"),
        ({"prompt": 7}, "prompt", "invalid_value", "expected a string or an array"),
        ({"prompt": []}, "prompt", "invalid_value", "length >= 1"),
        ({"prompt": [[1], []]}, "prompt", "invalid_value", "empty"),
        ({"prompt": ["a", 1]}, "prompt", "invalid_value", "only"),
        ({"prompt": [1.5]}, "prompt[0]", "invalid_value", "expected an integer"),
        ({"prompt": [-1]}, "prompt", "invalid_value", "-1"),
        ({"prompt": [2**70]}, "prompt", "invalid_value", str(2**70)),
        ({"prompt": ["a"] * 3000}, "prompt", "invalid_value", "3000"),
        (
            {"prompt": ["a"] * 600},
            "prompt",
            "invalid_value",
            "600 sequences, 1 for each prompt, and at most 512 are taken",
        ),
        ({"n": 1, "best_of": 1, "prompt": ["a"] * 513}, "prompt", "invalid_value", "--max-queue"),
        ({"n": 100, "prompt": ["a"] * 100}, "n", "invalid_value", "10000 sequences, 100 for each prompt"),
        ({"max_tokens": -1}, "max_tokens", "invalid_value", ">= 0"),
        ({"logprobs": 99}, "logprobs", "invalid_value", "<= 20"),
        ({"suffix": "end"}, "suffix", "unsupported_parameter", "'suffix'"),
        ({"guided_json": {}}, "guided_json", "unsupported_parameter", "'guided_json'"),
        ({"response_format": {}}, "response_format", "unsupported_parameter", "'response_format'"),
        ({"best_of": 2}, "best_of", "unsupported_parameter", "'n'"),
        ({"messages": []}, "messages", "unknown_parameter", "messages"),
    ],
)
def test_bad_fields_of_a_completion(
    client: httpx.Client, fields: dict[str, Any], param: str, code: str, says: str
) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": "The sun", "max_tokens": 4, **fields}
    assert_refused(client.post(COMPLETIONS, json=body), 400, param, code, says)


def test_prompts_longer_than_the_context(client: httpx.Client) -> None:
    limit = max_model_len(client)
    words = f"maximum context length is {limit} tokens"
    for content in ("so " * limit, "x" * 4_000_000):
        body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
        for stream in (False, True):
            answer = client.post(CHAT, json={**body, "stream": stream})
            assert_refused(answer, 400, "messages", "context_length_exceeded", words)
    for prompt in ("so " * limit, [5] * limit, [5] * 1_000_000):
        answer = client.post(COMPLETIONS, json={"model": MODEL, "prompt": prompt})
        assert_refused(answer, 400, "prompt", "context_length_exceeded", words)
    answer = client.post(CHAT, json={"model": MODEL, "messages": MESSAGES, "max_tokens": limit})
    assert_refused(answer, 400, "messages", "context_length_exceeded", words, f"{limit} in the completion")


@pytest.mark.parametrize(
    "name", ["gpt-4o", "", "Tiny", "../../etc/passwd", "ft:tiny:local::none", "ti\0ny", "x" * 10**5]
)
def test_unknown_models(client: httpx.Client, name: str) -> None:
    for path, body in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "x"}), (JOBS, {"training_file": "x"})):
        answer = client.post(path, json={"model": name, **body})
        assert_refused(answer, 404, "model", "model_not_found", name[:100], "does not exist")


def test_deep_nesting(client: httpx.Client) -> None:
    """JSON within JSON: what a client sends as text is parsed again."""
    for depth in (500, 900, 5000, 200_000):
        call = {"type": "function", "function": {"name": "f", "arguments": '{"a":' + "[" * depth + "]" * depth + "}"}}
        messages = [{"role": "assistant", "tool_calls": [call]}]
        answer = client.post(CHAT, json={"model": MODEL, "messages": messages})
        assert_refused(answer, 400, "messages", "context_length_exceeded")


def _longest_wait_beside(other: httpx.Client, act: Callable[[], None]) -> tuple[float, float]:
    """For how many seconds somebody else had to wait for an answer, at most, while ``act`` went on; and how many that
    took."""
    waits_s: list[float] = []
    has_ended, has_begun = threading.Event(), threading.Event()

    def watch() -> None:
        while not has_ended.is_set():
            start_s = time.monotonic()
            has_begun.set()
            other.get("/health").raise_for_status()
            waits_s.append(time.monotonic() - start_s)
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    has_begun.wait()
    start_s = time.monotonic()
    try:
        act()
        took_s = time.monotonic() - start_s
    finally:
        has_ended.set()
        watcher.join()
    return max(waits_s), took_s


def test_huge_requests_do_not_hold_up_others(client: httpx.Client, server: RunningServer) -> None:
    """Rendering and tokenising megabytes takes seconds. The server goes on meanwhile, and mostly does not begin."""
    text = "so " * 2_000_000
    call = {"type": "function", "function": {"name": "f", "arguments": text}}
    huge: list[dict[str, Any]] = [
        {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": text}}], "tool_choice": "none"},
        {"messages": [{"role": "assistant", "tool_calls": [call]}]},
        {"messages": [{"role": "user", "content": ""}] * 32_000},
    ]

    def refuse(body: dict[str, Any]) -> None:
        answer = client.post(CHAT, json={"model": MODEL, **body})
        assert_refused(answer, 400, "messages", "context_length_exceeded")

    with httpx.Client(base_url=server.base_url, timeout=120) as other:
        other.get("/health").raise_for_status()
        for body in huge:
            found = list[tuple[float, float]]()
            # On a slow machine it takes longer, but not most of what the huge one takes. A machine that pauses does not
            # do so each time.
            while not any(longest_s < max(1.5, 0.5 * took_s) for longest_s, took_s in found):
                assert len(found) < 5, found
                found.append(_longest_wait_beside(other, lambda: refuse(body)))  # noqa: B023 - called at once


# Ids, paths and methods.


ENDPOINTS = [
    ("GET", FILES + "/{}"),
    ("GET", FILES + "/{}/content"),
    ("DELETE", FILES + "/{}"),
    ("GET", JOBS + "/{}"),
    ("GET", JOBS + "/{}/events"),
    ("GET", JOBS + "/{}/checkpoints"),
    ("POST", JOBS + "/{}/cancel"),
    ("POST", JOBS + "/{}/pause"),
    ("POST", JOBS + "/{}/resume"),
    ("GET", "/v1/models/{}"),
]


@pytest.mark.parametrize(
    "name",
    [
        "file-nope", "..", "%2e%2e", "%2e%2e%2f", "../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%2fetc%2fpasswd",
        "..%2fcotenant.db", "..%5ccotenant.db", "%00", "file-%0a", "%ff", "'%20OR%201=1--", "*", "%25%32%65",
        "y" * 5000,
    ],
)  # fmt: skip
def test_unknown_and_path_like_ids(server: RunningServer, client: httpx.Client, name: str) -> None:
    upload(client, b"x")
    there = sorted(path for path in server.data_dir.rglob("*") if "db" not in path.name)
    for method, path in ENDPOINTS:
        response = request_as_written(server, method, path.format(name))
        assert response.status_code == 404, (method, path, response.text)
        error = error_of(response)
        assert error["code"] in ("file_not_found", "fine_tune_not_found", "model_not_found", "unknown_url")
        assert len(error["message"]) < 6000
        assert "root:" not in response.text
        assert "SQLite" not in response.text
    assert sorted(path for path in server.data_dir.rglob("*") if "db" not in path.name) == there


@pytest.mark.parametrize(
    ("path", "param"),
    [
        (FILES + "?limit=0", "limit"),
        (FILES + "?limit=" + "9" * 30, "limit"),
        (FILES + "?limit=NaN", "limit"),
        (FILES + "?order=up", "order"),
        (FILES + "?after=..%2fx", "after"),
        (JOBS + "?limit=-1", "limit"),
        (JOBS + "?after=ftjob-nope", "after"),
        (JOBS + "?" + "&".join(f"metadata[k{number}]=v" for number in range(2000)), "metadata"),
    ],
)
def test_bad_queries(client: httpx.Client, path: str, param: str) -> None:
    assert_refused(client.get(path), 400, param, "invalid_value", f"'{param}'")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("PUT", COMPLETIONS, "POST"),
        ("DELETE", "/v1/models", "GET"),
        ("PATCH", FILES, "GET, POST"),
        ("POST", FILES + "/file-x", "DELETE, GET"),
        ("GET", JOBS + "/ftjob-x/cancel", "POST"),
        ("POST", "/health", "GET"),
        ("OPTIONS", "/metrics", "GET"),
    ],
)
def test_wrong_methods(client: httpx.Client, method: str, path: str, allowed: str) -> None:
    answer = client.request(method, path)
    assert_refused(answer, 405, None, "method_not_allowed", method, path, allowed)
    assert answer.headers["allow"] == allowed


@pytest.mark.parametrize(
    "path",
    [
        "/", "/v1", "/v1/", "/v1/nothing", "/v1/embeddingsx", "/embeddings", "//v1/models", "/V1/models", "/v1/files/",
        "/v1/../../etc/passwd",
    ],
)  # fmt: skip
def test_unknown_paths(server: RunningServer, path: str) -> None:
    assert_refused(request_as_written(server, "GET", path), 404, None, "unknown_url", path)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/batches"),
        ("GET", "/v1/batches/batch_x"),
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/uploads"),
        ("POST", "/v1/images/generations"),
        ("POST", "/v1/audio/speech"),
        ("POST", "/v1/moderations"),
        ("GET", "/v1/assistants"),
        ("POST", "/v1/threads/runs"),
        ("DELETE", "/v1/vector_stores/vs_x"),
    ],
)
def test_paths_of_openais_that_are_not_served(client: httpx.Client, method: str, path: str) -> None:
    assert_refused(client.request(method, path), 404, None, "unsupported_endpoint", f"not support {method} {path}")


def test_json_bodies_past_the_limit(client: httpx.Client) -> None:
    body = b" " * (MAX_JSON_BYTES + 1)
    for path in (CHAT, JOBS, "/tokenize", "/v1/nothing"):
        assert_refused(client.post(path, content=body), 413, None, "request_too_large", str(MAX_JSON_BYTES))

    def pieces() -> Iterator[bytes]:  # without a Content-Length
        yield from itertools.repeat(b" " * (1 << 20), 40)

    assert_refused(client.post(CHAT, content=pieces()), 413, None, "request_too_large", str(MAX_JSON_BYTES))


def test_bodies_of_too_many_values(client: httpx.Client) -> None:
    for path in (CHAT, COMPLETIONS, JOBS, "/tokenize", "/detokenize", "/v1/load_lora_adapter"):
        for values, says in (
            ({f"k{number}": 1 for number in range(140_000)}, "131072 strings"),
            ([[]] * 140_000, "131072 arrays and objects"),
            ([1] * 1_200_000, "1114112 values"),
        ):
            body = {"model": MODEL, "prompt": "x", "user": values}
            assert_refused(client.post(path, json=body), 400, None, "request_too_complex", says)


def test_what_is_no_http(server: RunningServer) -> None:
    for raw in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET \xff\xfe HTTP/1.1\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
        assert b"Traceback" not in answer
        assert b" 200 " not in answer


# The key.


def test_without_the_right_key_nothing_is_done(server: RunningServer, client: httpx.Client) -> None:
    file_id = upload(client, b"x")
    there = stored(server)
    wrong = ({}, {"Authorization": "Bearer sk-wrong"}, {"Authorization": f"Basic {KEY}"}, {"Authorization": KEY},
             {"Authorization": "Bearer"}, {"Authorization": f"Bearer {KEY}x"}, {"x-api-key": KEY},
             {"Authorization": b"Bearer sk-\xff"})  # fmt: skip
    with httpx.Client(base_url=server.base_url, timeout=60) as stranger:
        for headers in wrong:
            for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("GET", f"{FILES}/{file_id}/content"),
                                 ("DELETE", f"{FILES}/{file_id}"), ("GET", "/v1/nothing"),
                                 ("POST", "/tokenize"), ("POST", "/detokenize")):  # fmt: skip
                answer = stranger.request(method, path, headers=headers)
                assert_refused(answer, 401, None, "invalid_api_key", "key")
                assert KEY not in answer.text
        assert stranger.get(f"/v1/models?api_key={KEY}").status_code == 401
        files = {"file": ("a", b"x" * 500_000)}
        assert stranger.post(FILES, files=files, data={"purpose": "fine-tune"}).status_code == 401
        for path in ("/%761/models", "/%74okenize"):
            assert request_as_written(server, "POST", path, headers={}).status_code == 401
        for path in ("/health", "/metrics", "/version"):
            assert stranger.get(path).status_code == 200
    assert stored(server) == there
