"""Bad input to a real server: each is refused by name, and the server goes on. And its description of itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

import serving
from online import MESSAGES, MODEL, error_of


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"messages": MESSAGES}, "model", "missing_required_parameter"),
        ({"model": MODEL}, "messages", "missing_required_parameter"),
        ({"model": MODEL, "messages": []}, "messages", "invalid_value"),
        ({"model": MODEL, "messages": MESSAGES, "max_tokens": -1}, "max_tokens", "invalid_value"),
        ({"model": MODEL, "messages": MESSAGES, "max_tokens": 10**30}, "max_tokens", "invalid_value"),
        ({"model": MODEL, "messages": MESSAGES, "temperature": 1e99}, "temperature", "invalid_value"),
        ({"model": MODEL, "messages": MESSAGES, "n": 10**9}, "n", "invalid_value"),
        ({"model": MODEL, "messages": MESSAGES, "max_tokens": 10**6}, "messages", "context_length_exceeded"),
        ({"model": MODEL, "messages": user("so " * 9999)}, "messages", "context_length_exceeded"),
        ({"model": MODEL, "messages": user("x" * 10**6)}, "messages", "context_length_exceeded"),
        ({"model": MODEL, "messages": MESSAGES, "logit_bias": {"99999999": 1}}, "logit_bias", "invalid_value"),
        ({"model": MODEL, "messages": MESSAGES, "response_format": {}}, "response_format", "unsupported_parameter"),
        ({"model": MODEL, "messages": MESSAGES, "guided_regex": ""}, "guided_regex", "unsupported_parameter"),
        ({"model": MODEL, "messages": MESSAGES, "response_format": {"type": "json_object"}}, "response_format",
         "unsupported_parameter"),
        ({"model": MODEL, "messages": MESSAGES, "colour": "red"}, "colour", "unknown_parameter"),
        ([1, 2], None, "invalid_json"),
    ],
)  # fmt: skip
def test_a_bad_body_is_a_400_that_names_it(http: httpx.Client, body: Any, param: str | None, code: str) -> None:
    response = http.post("/v1/chat/completions", json=body)
    error = error_of(response)
    assert response.status_code == 400
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/detokenize", {"tokens": [5] * 1_100_000 + ["x"]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [5] * (2**20 + 1)}, "tokens", "invalid_value"),
        ("/v1/completions", {"model": MODEL, "prompt": [5] * 1_000_000 + [-1]}, "prompt", "context_length_exceeded"),
        ("/v1/completions", {"model": MODEL, "prompt": [[5], [5] * 9999 + [-1]]}, "prompt", "context_length_exceeded"),
        ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": ["x"] * 60_000 + [1]}]},
         "messages", "context_length_exceeded"),
        ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "x", "content": [""] * 300}] * 200},
         "messages", "context_length_exceeded"),
    ],
)  # fmt: skip
def test_what_is_far_too_long_is_refused_before_each_part_is_looked_at(
    http: httpx.Client, path: str, body: Any, param: str, code: str
) -> None:
    """Each has a flaw that only such a look finds."""
    response = http.post(path, json=body)
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (400, param, code), error
    assert "maximum context length" in error["message"] or "with a length <= 1048576" in error["message"]


def test_the_key_is_named_whose_value_is_wrong(http: httpx.Client) -> None:
    bias = {str(token): 1 for token in range(100)} | {"7": 101}
    error = error_of(http.post("/v1/completions", json={"model": MODEL, "prompt": "a", "logit_bias": bias}))
    assert error["message"] == "Invalid 'logit_bias': for the key '7' expected a number <= 100.0."
    assert (error["param"], error["code"]) == ("logit_bias", "invalid_value")
    job = {"model": MODEL, "training_file": "x", "metadata": {"a": "ok", "b" * 50: 1}}
    error = error_of(http.post("/v1/fine_tuning/jobs", json=job))
    assert error["message"] == f"Invalid 'metadata': for the key '{'b' * 40}' expected a string, got an integer."
    error = error_of(http.post("/v1/completions", json={"model": MODEL, "prompt": "a", "logit_bias": {}, "n": "x"}))
    assert error["param"] == "n"


def test_tokens_are_of_a_prompt_or_of_messages(http: httpx.Client) -> None:
    error = error_of(http.post("/tokenize", json={}))
    assert (error["param"], error["code"]) == ("prompt", "missing_required_parameter")
    error = error_of(http.post("/tokenize", json={"prompt": "a", "messages": MESSAGES}))
    assert (error["param"], error["code"]) == ("messages", "invalid_value")
    assert "not both" in error["message"]


def test_many_parts_and_ids_that_fit_are_taken(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": ""} for _ in range(200)]  # joined by line breaks
    answer = http.post("/tokenize", json={"model": MODEL, "messages": [{"role": "user", "content": parts}] * 3})
    assert answer.status_code == 200
    ids = answer.json()["tokens"] * 100
    text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert text == http.post("/detokenize", json={"tokens": answer.json()["tokens"]}).json()["prompt"] * 100
    assert text.count("\n") >= 199 * 3 * 100
    with_strings = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert len(with_strings["token_strs"]) == with_strings["count"]
    refused = http.post("/detokenize", json={"tokens": [*ids, 10**6]})
    assert refused.status_code == 400
    assert "token id 1000000 is not in the vocabulary" in error_of(refused)["message"]


@pytest.mark.parametrize("raw", [b"", b"{", b'{"model": NaN}', b"\xff\xfe", b"[" * 100_000, b'{"model": "\\ud800"}'])
def test_malformed_json_is_a_400(http: httpx.Client, raw: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
        response = http.post(path, content=raw)
        assert response.status_code == 400
        assert error_of(response)["code"] == "invalid_json"


def test_a_bad_stream_fails_before_it_begins(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json={"model": MODEL, "messages": [], "stream": True})
    assert response.status_code == 400
    assert error_of(response)["param"] == "messages"


def test_an_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="ft:tiny:local:nobody:x", messages=MESSAGES)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("some/other:model")


def test_what_a_client_names_is_one_line_of_the_log(server: serving.RunningServer, http: httpx.Client) -> None:
    named = "none\n2026-01-01 00:00:00,000 ERROR cotenant: not so"
    answer = http.post("/v1/completions", json={"model": named, "prompt": "x"})
    assert answer.status_code == 404
    (line,) = [line for line in server.log.splitlines() if "not so" in line]
    assert "none\\n2026-01-01" in line


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("GET", "/v1/nothing", 404, "Unknown request URL"),
        ("POST", "/v1/embeddings", 404, "does not support"),
        ("DELETE", "/v1/chat/completions", 405, "Not allowed to DELETE"),
        ("GET", "/v1/files?limit=0", 400, "Invalid 'limit'"),
        ("GET", "/no/such%0apath", 404, "/no/such\\npath"),
        ("GET", f"/{'long' * 10_000}", 404, "Unknown request URL: GET /longlong"),
    ],
)
def test_each_refusal_is_a_line_of_the_log(
    server: serving.RunningServer, http: httpx.Client, method: str, path: str, status: int, said: str
) -> None:
    name = f"refused-{status}-{abs(hash(path))}"
    assert http.request(method, path, headers={"x-request-id": name}).status_code == status
    (line,) = [line for line in server.log.splitlines() if name in line]
    assert f": {status}: " in line
    assert len(line) < 3000
    assert said in line


def test_health_may_be_asked_for_its_head_alone(http: httpx.Client) -> None:
    answer = http.head("/health")
    assert (answer.status_code, answer.content) == (200, b"")


def test_unknown_paths_and_methods(http: httpx.Client) -> None:
    response = http.get("/v1/nothing")
    assert response.status_code == 404
    assert error_of(response)["code"] == "unknown_url"
    for method, path, allowed in (
        ("DELETE", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models/a/b", "GET"),
        ("PUT", "/tokenize", "POST"),
        ("PATCH", "/health", "GET"),
    ):
        response = http.request(method, path)
        assert response.status_code == 405
        assert error_of(response)["code"] == "method_not_allowed"
        assert allowed in response.headers["allow"].split(", ")


def test_a_body_over_the_limit_is_a_413(server: serving.RunningServer, http: httpx.Client) -> None:
    response = http.post("/v1/completions", content=b" " * (33 * 1024 * 1024))
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"


def test_the_request_id_is_the_clients_if_it_is_plain(http: httpx.Client) -> None:
    assert http.get("/version", headers={"x-request-id": "my-id.1"}).headers["x-request-id"] == "my-id.1"
    made = http.get("/version", headers={"x-request-id": "my id\tx"}).headers["x-request-id"]
    assert made.startswith("req-")


def test_the_openapi_document_describes_the_routes(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert {"200", "400", "401", "404", "413", "503"} <= set(chat["responses"])
    reference = chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
    assert document["components"]["schemas"][reference]["required"] == ["model", "messages"]
    for operations in document["paths"].values():
        for operation in operations.values():
            assert "422" not in operation["responses"]
    for name in _references(document):
        assert name in document["components"]["schemas"]


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"].rsplit("/", 1)[1]
        for child in node.values():
            yield from _references(child)
    elif isinstance(node, list):
        for child in node:
            yield from _references(child)
