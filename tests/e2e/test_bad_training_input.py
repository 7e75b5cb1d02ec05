"""Bad uploads, training files and jobs: each is refused by name, in OpenAI's shape, and disturbs nobody."""

from __future__ import annotations

import itertools
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.refusals import (
    FILES,
    HEADERS,
    JOBS,
    KEY,
    MAX_UPLOAD_BYTES,
    assert_refused,
    create_job,
    hyperparameters,
    stored,
    upload,
    wait_for,
    wait_until,
)
from online import MODEL
from serving import RunningServer

pytestmark = pytest.mark.usefixtures("undisturbed")

HYPER = "method.supervised.hyperparameters"


# Files.


def example(number: int) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": f"What is {number}?"},
            {"role": "assistant", "content": f"It is {number}."},
        ]
    }


def pair(number: int) -> dict[str, Any]:
    return {"prompt": f"What is {number}?", "chosen": f"It is {number}.", "rejected": "Who knows."}


def lines(count: int, *changed: tuple[int, Any]) -> bytes:
    """A training file whose line numbers ``changed`` are replaced: by bytes as they are, or by an example."""
    return _joined([example(number) for number in range(count)], changed)


def pair_lines(count: int, *changed: tuple[int, Any]) -> bytes:
    """The same with preferences."""
    return _joined([pair(number) for number in range(count)], changed)


def _joined(examples: list[dict[str, Any]], changed: tuple[tuple[int, Any], ...]) -> bytes:
    made = [json.dumps(item).encode() for item in examples]
    for number, line in changed:
        made[number - 1] = line if isinstance(line, bytes) else json.dumps(line).encode()
    return b"\n".join(made)


def with_answer(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", **message}]}


def test_bad_uploads(client: httpx.Client, server: RunningServer) -> None:
    there = stored(server)
    for data, param in (({"purpose": "fun"}, "purpose"), ({"purpose": "fine-tune-results"}, "purpose")):
        answer = client.post(FILES, files={"file": ("a", b"x")}, data=data)
        assert_refused(answer, 400, param, "invalid_value", "expected one of")
    answer = client.post(FILES, files={"file": ("a", b"x")})
    assert_refused(answer, 400, "purpose", "missing_required_parameter", "'purpose'")
    answer = client.post(FILES, files={"other": ("a", b"x")}, data={"purpose": "fine-tune"})
    assert_refused(answer, 400, "file", "invalid_value", "'file'")
    answer = client.post(FILES, files={"file": ("a", b"x")}, data={"purpose": "fine-tune", "expires_after": "1"})
    assert_refused(answer, 400, "expires_after", "unknown_parameter", "expires_after")
    answer = client.post(FILES, json={"purpose": "fine-tune"})
    assert_refused(answer, 400, "file", "invalid_multipart", "multipart/form-data")
    answer = client.post(FILES, content=b"x", headers={"Content-Type": "multipart/form-data; boundary=B"})
    assert_refused(answer, 400, "file", "invalid_multipart", "not a form")
    assert stored(server) == there


def test_uploads_past_the_limit(client: httpx.Client, server: RunningServer) -> None:
    there = stored(server)
    for num_bytes in (MAX_UPLOAD_BYTES + 1, 8 << 20):
        answer = client.post(FILES, files={"file": ("a", b"x" * num_bytes)}, data={"purpose": "fine-tune"})
        assert_refused(answer, 413, "file", "file_too_large", f"larger than {MAX_UPLOAD_BYTES} bytes")

    def endless() -> Iterator[bytes]:
        yield b'--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        yield from itertools.repeat(b"x" * 65536, 100)

    # Its size is announced nowhere. Either limit may be met first, the file's or the one of the body around it.
    answer = client.post(FILES, content=endless(), headers={"Content-Type": "multipart/form-data; boundary=B"})
    assert_refused(answer, 413, "file", "file_too_large", f"larger than {MAX_UPLOAD_BYTES} bytes")
    assert stored(server) == there


def test_an_upload_that_breaks_off_leaves_nothing(server: RunningServer) -> None:
    there = stored(server)
    head = (
        f"POST {FILES} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 1000000\r\n"
        "Content-Type: multipart/form-data; boundary=B\r\n\r\n"
        '--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    )
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + b"x" * 500_000)
        wait_until(lambda: stored(server) != there)
    wait_until(lambda: stored(server) == there)


@pytest.mark.parametrize(
    "name", ["../../escaped.jsonl", "/etc/escaped", "..", "a\\..\\b", "\u202e\u65e5\u672c\u8a9e", "x" * 500]
)
def test_a_files_name_is_only_shown(client: httpx.Client, server: RunningServer, name: str) -> None:
    outside = {path for path in server.data_dir.parent.rglob("*") if "files" not in path.parts}
    content = lines(1)
    file_id = upload(client, content, name=name)
    assert (server.data_dir / "files" / file_id).read_bytes() == content
    download = client.get(f"{FILES}/{file_id}/content")
    assert download.content == content
    disposition = download.headers["content-disposition"]
    assert disposition.startswith("attachment; filename*=utf-8''")
    assert not set(disposition.partition("''")[2]) & set('/\\"; ')
    assert {path for path in server.data_dir.parent.rglob("*") if "files" not in path.parts} == outside
    assert client.delete(f"{FILES}/{file_id}").status_code == 200


# Jobs.


@pytest.fixture(scope="module")
def good_file(client: httpx.Client) -> str:
    return upload(client, lines(12))


DEEP_CALL = {"type": "function", "function": {"name": "f", "arguments": "[" * 50_000}}


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        (lines(3), "invalid_n_examples", "has 3 example(s), but must have at least 10"),
        (b"", "invalid_n_examples", "has 0 example(s)"),
        (lines(80, (57, b'{"messages": [{"role": ')), "invalid_training_file", "Line 57 is not valid JSON"),
        (lines(80, (57, b"")), "invalid_training_file", "Line 57 is empty"),
        (lines(80, (57, [1])), "invalid_training_file", "Line 57 is not a dictionary"),
        (lines(12, (6, with_answer(content=""))), "invalid_training_file", "message 2 (assistant): its 'content'"),
        (lines(12, (6, with_answer(content=" \n"))), "invalid_training_file", "Line 6, message 2"),
        (lines(12, (6, with_answer(content="x", weight=2))), "invalid_training_file", "'weight' must be 0 or 1"),
        (lines(12, (6, with_answer(content="word " * 50_000))), "invalid_training_file", "Line 6: it has "),
        (lines(12, (6, with_answer(tool_calls=[DEEP_CALL]))), "invalid_training_file", "nested too deeply"),
        (lines(12, (6, b"[" * 50_000)), "invalid_training_file", "Line 6 is nested too deeply"),
        (lines(12, (6, b'{"messages": NaN}')), "invalid_training_file", "Line 6 is not valid JSON: NaN"),
        (lines(12, (6, b'{"messages": [], "a": "\\ud800"}')), "invalid_training_file", "Line 6"),
        (lines(12).decode().encode("utf-16"), "invalid_training_file", "UTF-16"),
        (lines(12).decode().encode("utf-16-le"), "invalid_training_file", "UTF-16"),
        (lines(12, (6, '{"messages": "caf\u00e9"}'.encode("latin-1"))), "invalid_training_file", "Line 6 is not UTF-8"),
        (b"PK\x03\x04" + bytes(range(256)) * 8, "invalid_training_file", "Line 1"),
    ],
)  # fmt: skip
def test_bad_training_files(client: httpx.Client, content: bytes, code: str, says: str) -> None:
    file_id = upload(client, content)
    job = wait_for(client, create_job(client, training_file=file_id), "failed")
    assert (job["error"]["code"], job["error"]["param"]) == (code, "training_file")
    assert says in job["error"]["message"]
    assert job["fine_tuned_model"] is None
    event = client.get(f"{JOBS}/{job['id']}/events").json()["data"][0]
    assert (event["level"], event["message"]) == ("error", job["error"]["message"])


def test_a_bad_validation_file(client: httpx.Client, good_file: str) -> None:
    bad = upload(client, b"not JSON")
    job = wait_for(client, create_job(client, training_file=good_file, validation_file=bad), "failed")
    assert (job["error"]["code"], job["error"]["param"]) == ("invalid_validation_file", "validation_file")


def test_an_empty_validation_file(client: httpx.Client, good_file: str) -> None:
    job_id = create_job(client, training_file=good_file, validation_file=upload(client, b""))
    error = wait_for(client, job_id, "failed")["error"]
    assert (error["code"], error["param"]) == ("invalid_n_examples", "validation_file")
    assert error["message"] == "Validation file has 0 example(s), but must have at least 1 example"


@pytest.mark.parametrize("method", ["supervised", "dpo"])
def test_a_learning_rate_of_a_million(client: httpx.Client, method: str) -> None:
    """The job fails by itself, what it has saved before its weights were lost stays, and nobody else notices."""
    content = lines(12) if method == "supervised" else pair_lines(12)
    settings = {"learning_rate": 1e6, "warmup_steps": 1, "save_steps": 1, "n_epochs": 10}
    fields = {"method": {"type": method, method: {"hyperparameters": settings}}}
    job_id = create_job(client, training_file=upload(client, content), **fields)
    job = wait_for(client, job_id, "failed")
    assert job["error"]["code"] == "training_diverged"
    assert "The loss is not finite at step " in job["error"]["message"]
    found = re.search(r"at step (\d+)", job["error"]["message"])
    assert found is not None
    step = int(found.group(1))
    saved = client.get(f"{JOBS}/{job_id}/checkpoints").json()["data"]
    assert [checkpoint["step_number"] for checkpoint in saved] == list(range(step - 2, 0, -1))
    events = client.get(f"{JOBS}/{job_id}/events").json()["data"]
    assert [event["message"].partition(" is not")[0] for event in events if event["level"] == "warn"] == [
        f"The checkpoint of step {step - 1}"
    ]


def test_a_warm_up_longer_than_the_job(client: httpx.Client, good_file: str) -> None:
    job_id = create_job(client, training_file=good_file, **hyperparameters(warmup_steps=100, max_steps=1))
    wait_for(client, job_id, "succeeded")
    events = client.get(f"{JOBS}/{job_id}/events").json()["data"]
    (warning,) = [event["message"] for event in events if event["level"] == "warn"]
    assert warning.startswith("The warm-up takes 100 step(s), and the job has 1: the learning rate begins at 0")


def test_a_batch_larger_than_the_data(client: httpx.Client, good_file: str) -> None:
    job_id = create_job(client, training_file=good_file, **hyperparameters(batch_size=64, n_epochs=2))
    job = wait_for(client, job_id, "succeeded")
    events = client.get(f"{JOBS}/{job_id}/events").json()["data"]
    assert [event["message"] for event in events if event["level"] == "warn"] == [
        "batch_size is 64, but the training file has 12 examples: each step takes all of them"
    ]
    assert sum(event["type"] == "metrics" for event in events) == 2
    assert job["fine_tuned_model"]


def test_a_rank_pattern_that_fits_no_module(client: httpx.Client, good_file: str) -> None:
    """It is refused at once, or as it starts if to match it may take long."""
    fields = hyperparameters(rank_pattern={"layers.99.self_attn.q_proj": 4})
    refused = client.post(JOBS, json={"model": MODEL, "training_file": good_file, **fields})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "invalid_hyperparameters"
    assert error["param"].endswith("hyperparameters.rank_pattern")
    assert "'layers.99.self_attn.q_proj' fits none of the modules" in error["message"]
    fields = hyperparameters(rank_pattern={"layers.9+.self_attn.q_proj": 4})
    error = wait_for(client, create_job(client, training_file=good_file, **fields), "failed")["error"]
    assert (error["code"], error["param"]) == ("invalid_hyperparameters", "rank_pattern")
    assert "rank_pattern: 'layers.9+.self_attn.q_proj' fits none of the modules" in error["message"]


def test_a_pair_of_which_the_cut_leaves_nothing(client: httpx.Client) -> None:
    long = {"prompt": "word " * 100, "chosen": "a", "rejected": "b"}
    fields = {"method": {"type": "dpo", "dpo": {"hyperparameters": {"max_length": 40}}}}
    files = {
        "training_file": upload(client, pair_lines(12)),
        "validation_file": upload(client, pair_lines(2, (2, long))),
    }
    error = wait_for(client, create_job(client, **files, **fields), "failed")["error"]
    assert (error["code"], error["param"]) == ("invalid_validation_file", "validation_file")
    assert "Line 2 of the validation file has nothing left" in error["message"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "Line 7 is not valid JSON"),
        ({"input": {"messages": []}}, "Line 7 has no 'preferred_output'"),
        ({"prompt": "Hi", "chosen": "a", "rejected": ""}, "Line 7, 'rejected', message 1: its 'content' is empty"),
        (example(1), "Line 7: it has 'messages', which is for method.type 'supervised'"),
    ],
)
def test_bad_preference_lines(client: httpx.Client, line: Any, says: str) -> None:
    file_id = upload(client, pair_lines(12, (7, line)))
    job = wait_for(client, create_job(client, training_file=file_id, method={"type": "dpo"}), "failed")
    assert (job["error"]["code"], job["error"]["param"]) == ("invalid_training_file", "training_file")
    assert says in job["error"]["message"]


@pytest.mark.parametrize("param", ["training_file", "validation_file"])
def test_files_that_are_not_there_or_for_something_else(client: httpx.Client, good_file: str, param: str) -> None:
    files = {"training_file": good_file}
    for file_id in ("file-nope", "../cotenant.db", "/etc/passwd", "a\0b", "x" * 10_000):
        answer = client.post(JOBS, json={"model": MODEL, **files, param: file_id})
        assert_refused(answer, 400, param, "file_not_found", f"'{param}'", file_id[:100])
    other = upload(client, lines(12), purpose="batch")
    answer = client.post(JOBS, json={"model": MODEL, **files, param: other})
    assert_refused(answer, 400, param, "invalid_file_purpose", "'batch'", "'fine-tune'")
    answer = client.post(JOBS, json={"model": MODEL, **files, param: 7})
    assert_refused(answer, 400, param, "invalid_value", "expected a string")


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"training_file": None}, "training_file", "missing_required_parameter"),
        *(
            ({"suffix": suffix}, "suffix", "invalid_suffix")
            for suffix in ("a/b", "../a", "..", ".a", "a b", "a\n", "a\0", "\u00e9", "\u65e5", "x" * 65, "%2e%2e", "-a")
        ),
        ({"suffix": 7}, "suffix", "invalid_value"),
        ({"seed": -1}, "seed", "invalid_value"),
        ({"seed": 2**70}, "seed", "invalid_value"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata", "invalid_value"),
        ({"metadata": {"k": 1}}, "metadata", "invalid_value"),
        ({"metadata": {"k" * 65: "x"}}, "metadata", "invalid_value"),
        ({"integrations": [{"type": "wandb"}]}, "integrations", "unsupported_parameter"),
        ({"colour": "red"}, "colour", "unknown_parameter"),
        ({"method": "supervised"}, "method", "invalid_value"),
        ({"method": {}}, "method.type", "missing_required_parameter"),
        ({"method": {"type": "magic"}}, "method.type", "invalid_value"),
        ({"method": {"type": "supervised", "extra": 1}}, "method.extra", "unknown_parameter"),
        (
            {"method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": -1}}}},
            "method.dpo.hyperparameters.beta",
            "invalid_hyperparameters",
        ),
        ({"method": {"type": "reinforcement", "reinforcement": {}}}, "method.type", "unsupported_method"),
        ({"hyperparameters": {"n_epochs": -1}}, "hyperparameters.n_epochs", "invalid_hyperparameters"),
        ({"hyperparameters": {"x" * 5000: 1}}, "hyperparameters." + "x" * 100, "unknown_parameter"),
    ],
)  # fmt: skip
def test_bad_fields_of_a_job(
    client: httpx.Client, good_file: str, fields: dict[str, Any], param: str, code: str
) -> None:
    answer = client.post(JOBS, json={"model": MODEL, "training_file": good_file, **fields})
    words = param.rpartition(".")[2] if code != "unsupported_method" else fields["method"]["type"]
    assert_refused(answer, 400, param, code, words)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("r", (0, -1, 65, 1.5, "8", True, 2**70, 1e308, [8])),
        ("n_epochs", (0, -3, 10**9, "many", {})),
        ("batch_size", (0, 10**9, 2**70)),
        ("learning_rate", (-1, 0, 2e6, 1e308, 2**70, int("9" * 4000), "fast")),
        ("learning_rate_multiplier", (-1, 0, 1e308)),
        ("target_modules", (["lm_head"], "everything", [], {"q_proj": 1}, [["q_proj"]], 7)),
        ("lr_scheduler_type", ("random", ["linear"], 1)),
        ("lora_dropout", (1, -0.1)),
        ("lora_alpha", (0, -1)),
        ("max_length", (1, 10**9)),
        ("max_steps", (0, -2, 10**9)),
        ("save_steps", (-1,)),
        ("warmup_ratio", (-1, 2)),
        ("seed", (-1, 2**70)),
        ("packing", (1, "yes")),
        ("assistant_only_loss", (False,)),
    ],
)
def test_hyperparameters_out_of_range(client: httpx.Client, good_file: str, name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        body = {"model": MODEL, "training_file": good_file, **hyperparameters(**{name: value})}
        place = f"{HYPER}.{name}"
        assert_refused(client.post(JOBS, json=body), 400, place, "invalid_hyperparameters", place, "expected")


def test_unknown_hyperparameters(client: httpx.Client, good_file: str) -> None:
    for name in ("rank", "lr", "__class__", ""):
        body = {"model": MODEL, "training_file": good_file, **hyperparameters(**{name: 1})}
        assert_refused(
            client.post(JOBS, json=body), 400, f"{HYPER}.{name}", "unknown_parameter", f"'{name}'", "Known are"
        )


def test_what_has_ended_cannot_be_stopped(client: httpx.Client, good_file: str) -> None:
    succeeded = create_job(client, training_file=good_file, **hyperparameters(max_steps=1))
    wait_for(client, succeeded, "succeeded")
    failed = create_job(client, training_file=upload(client, b""))
    wait_for(client, failed, "failed")
    for job_id, status in ((succeeded, "succeeded"), (failed, "failed")):
        for action in ("cancel", "pause", "resume"):
            answer = client.post(f"{JOBS}/{job_id}/{action}")
            assert_refused(answer, 400, "fine_tuning_job_id", "invalid_job_status", job_id, f"'{status}'")
        assert client.get(f"{JOBS}/{job_id}").json()["status"] == status
    adapter = client.get(f"{JOBS}/{succeeded}").json()["fine_tuned_model"]
    answer = client.post(JOBS, json={"model": adapter, "training_file": good_file})
    assert_refused(answer, 400, "model", "model_not_available", adapter)


def test_files_in_use_cannot_be_deleted(client: httpx.Client) -> None:
    training, validation = upload(client, lines(12)), upload(client, lines(2))
    fields = {"training_file": training, "validation_file": validation}
    job_id = create_job(client, **fields, **hyperparameters(max_steps=10**6))
    wait_for(client, job_id, "running")
    for file_id in fields.values():
        assert_refused(client.delete(f"{FILES}/{file_id}"), 409, "file_id", "file_in_use", file_id, job_id)
    assert client.get(f"{JOBS}/{job_id}").json()["status"] == "running"
    assert client.post(f"{JOBS}/{job_id}/cancel").status_code == 200
    wait_for(client, job_id, "cancelled")
    for file_id in fields.values():
        assert client.delete(f"{FILES}/{file_id}").status_code == 200
        assert_refused(client.delete(f"{FILES}/{file_id}"), 404, "file_id", "file_not_found", file_id)


def test_the_data_folder_holds_what_it_should(server: RunningServer) -> None:
    """After all of the above: no temporary files, and nothing in ``files/`` that the server does not list."""
    with httpx.Client(base_url=server.base_url, headers=HEADERS, timeout=60) as client:
        listed = {file["id"] for file in client.get(FILES).json()["data"]}
    assert stored(server) == listed
    assert not list(server.data_dir.rglob(".tmp-*"))
    assert not Path("/etc/escaped").exists()
