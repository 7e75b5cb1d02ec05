"""`cotenant jobs` against a real server."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

from cotenant.cli import client as cli_client
from cotenant.cli.client import ApiClient
from cotenant.cli.main import app
from cotenant.core.errors import CotenantError, InvalidInputError
from serving import RunningServer, running_server

KEY = "open-sesame"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("jobs")
    with running_server(folder / "data", "--api-key", KEY, "--slo-ttft-ms", "500", "--slo-tpot-ms", "100") as running:
        yield running


@pytest.fixture
def training_file(tmp_path: Path) -> Path:
    def example(number: int) -> str:
        user = {"role": "user", "content": f"What is number {number}?"}
        return json.dumps({"messages": [user, {"role": "assistant", "content": f"It is {number}, of course."}]})

    file = tmp_path / "train.jsonl"
    file.write_text("".join(example(number) + "\n" for number in range(12)))
    return file


def client_of(server: RunningServer) -> httpx.Client:
    return httpx.Client(base_url=server.base_url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)


def jobs(server: RunningServer, *arguments: str) -> Result:
    result = CliRunner().invoke(
        app, ["jobs", *arguments, "--url", f"{server.base_url}/v1", "--api-key", KEY], env={"COLUMNS": "250"}
    )
    if isinstance(result.exception, CotenantError):
        raise result.exception
    return result


def create(server: RunningServer, file: Path, *arguments: str) -> str:
    result = jobs(server, "create", str(file), "--model", "tiny", *arguments)
    assert result.exit_code == 0, result.output
    return result.output.strip().splitlines()[0]


def wait_running(server: RunningServer, job_id: str, timeout_s: float = 60) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not re.search(r"status +│ running", jobs(server, "show", job_id).output):
        assert time.monotonic() < deadline_s, "the job did not start"
        time.sleep(0.1)


def test_a_job_from_create_to_its_model(server: RunningServer, training_file: Path) -> None:
    job_id = create(
        server, training_file, "--suffix", "numbers", "--seed", "3", "--validation-file", str(training_file),
        "-H", "n_epochs=2", "-H", "batch_size=4", "-H", "r=4", "-H", 'target_modules=["q_proj","v_proj"]',
    )  # fmt: skip
    watched = jobs(server, "watch", job_id, "--interval", "0.2")
    assert watched.exit_code == 0, watched.output
    assert "Created fine-tuning job" in watched.output
    assert "The job has successfully completed" in watched.output
    last = watched.output.strip().splitlines()[-1]
    assert re.search(r"succeeded +step 6(/6)? +loss \d+\.\d{4}", last), last
    assert "numbers" in last

    shown = jobs(server, "show", job_id).output
    assert re.search(r"status +│ succeeded", shown)
    assert "ckpt-step" in shown
    events = jobs(server, "events", job_id, "--limit", "100").output
    assert events.index("Created fine-tuning job") < events.index("The job has successfully completed")
    (line,) = [line for line in jobs(server, "list").output.splitlines() if job_id in line]
    assert "succeeded" in line


def test_what_a_job_is_can_be_seen_and_its_id_copied(server: RunningServer, training_file: Path) -> None:
    job_id = create(
        server, training_file, "--validation-file", str(training_file), "-H", "n_epochs=2", "-H", "batch_size=4",
        "-H", "eval_steps=2", "-H", "save_steps=2", "-H", "r=4", "-H", "use_rslora=true",
        "-H", 'rank_pattern={"q_proj": 2}', "-H", "warmup_steps=2",
    )  # fmt: skip
    assert jobs(server, "watch", job_id, "--interval", "0.2").exit_code == 0
    shown = jobs(server, "show", job_id).output
    for name, value in (("method", "supervised"), ("r", "4"), ("learning_rate", "0.0002"), ("step", "6 of 6"),
                        ("use_rslora", "True"), ("rank_pattern", "{'q_proj': 2}"), ("warmup_steps", "2"),
                        ("eval_steps", "2")):  # fmt: skip
        assert re.search(rf"│ {name} +│ {value} ", shown), shown
    assert "lora_dropout" not in shown
    assert "weight_decay" not in shown
    assert re.search(r"│ 2 +│ \d+\.\d+ +│ \d+\.\d+ +│", shown), "a step at which a part was measured"
    piped = CliRunner().invoke(app, ["jobs", "list", "--url", server.base_url, "--api-key", KEY], env={"COLUMNS": "60"})
    (line,) = [line for line in piped.output.splitlines() if job_id in line]
    assert "succeeded" in line
    assert "ft:tiny:" in line


@pytest.mark.parametrize("page", [100, 5])
def test_all_checkpoints_of_a_job_are_shown(
    server: RunningServer, training_file: Path, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    """More than a page of the API's has if nothing else is said, and more than one of ours."""
    monkeypatch.setattr(cli_client, "_PAGE", page)
    job_id = create(server, training_file, "-H", "n_epochs=4", "-H", "batch_size=4", "-H", "save_steps=1", "-H", "r=2")
    assert jobs(server, "watch", job_id, "--interval", "0.2").exit_code == 0
    steps = [int(step) for step in re.findall(r":ckpt-step-(\d+)", jobs(server, "show", job_id).output)]
    assert steps == list(range(12, 0, -1))


def test_programs_get_the_apis_json(server: RunningServer, training_file: Path) -> None:
    created = json.loads(jobs(server, "create", str(training_file), "--model", "tiny", "--json").output)
    assert created["object"] == "fine_tuning.job"
    assert jobs(server, "cancel", created["id"]).exit_code == 0
    assert json.loads(jobs(server, "show", created["id"], "--json").output)["status"] == "cancelled"
    listed = json.loads(jobs(server, "list", "--json").output)
    assert listed["object"] == "list"
    assert created["id"] in [job["id"] for job in listed["data"]]
    with pytest.raises(InvalidInputError, match="leave --watch out"):
        jobs(server, "create", str(training_file), "--model", "tiny", "--json", "--watch")


def test_an_ended_job_is_deleted(server: RunningServer, training_file: Path) -> None:
    job_id = create(server, training_file, "-H", "n_epochs=50", "-H", "batch_size=1")
    wait_running(server, job_id)
    with pytest.raises(CotenantError, match="Cancel it or wait until it has ended"):
        jobs(server, "delete", job_id)
    assert jobs(server, "cancel", job_id).exit_code == 0
    assert jobs(server, "delete", job_id).output.strip() == f"{job_id}: deleted"
    assert job_id not in jobs(server, "list").output


@pytest.mark.parametrize(
    ("action", "status", "says"),
    [
        ("cancel", "running", "running; the cancellation is requested and not done yet"),
        ("pause", "running", "running; the pause is requested and not done yet"),
        ("pause", "paused", "paused\n"),
        ("resume", "running", "running\n"),
    ],
)
def test_a_stop_that_is_still_to_come_is_told_from_one_that_is_done(
    monkeypatch: pytest.MonkeyPatch, action: str, status: str, says: str
) -> None:
    monkeypatch.setattr(ApiClient, "post", lambda *_: {"id": "ftjob-1", "status": status})
    result = CliRunner().invoke(app, ["jobs", action, "ftjob-1"])
    assert result.output.startswith(f"ftjob-1: {says}")


def test_files_of_a_job_that_is_refused_are_deleted(server: RunningServer, training_file: Path) -> None:
    with client_of(server) as client:
        before = client.get("/v1/files").json()["data"]
        with pytest.raises(CotenantError, match=r"\.r'"):
            jobs(server, "create", str(training_file), "--model", "tiny", "--validation-file", str(training_file),
                 "-H", "r=0")  # fmt: skip
        assert client.get("/v1/files").json()["data"] == before


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", "[0.1, 1e999]"])
def test_numbers_that_are_not_finite_are_refused_before_anything_is_uploaded(
    server: RunningServer, training_file: Path, value: str
) -> None:
    with client_of(server) as client:
        before = client.get("/v1/files").json()["data"]
        with pytest.raises(InvalidInputError, match=r"-H learning_rate: .* is not a finite number"):
            jobs(server, "create", str(training_file), "--model", "tiny", "-H", f"learning_rate={value}")
        with pytest.raises(InvalidInputError, match=r"-H n_epochs: is given twice"):
            jobs(server, "create", str(training_file), "--model", "tiny", "-H", "n_epochs=1", "-H", "n_epochs=2")
        assert client.get("/v1/files").json()["data"] == before


def test_files_are_deleted_however_the_creation_ends(
    server: RunningServer, training_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ApiClient, "post", interrupted)
    with client_of(server) as client:
        before = client.get("/v1/files").json()["data"]
        assert jobs(server, "create", str(training_file), "--model", "tiny").exit_code != 0
        assert client.get("/v1/files").json()["data"] == before


def test_what_is_no_text_is_said_and_leaves_no_file(server: RunningServer, training_file: Path) -> None:
    with client_of(server) as client:
        before = client.get("/v1/files").json()["data"]
        with pytest.raises(CotenantError, match=r"'\\udcff' in what was given is no text that can be sent"):
            jobs(server, "create", str(training_file), "--model", "r\udcff")
        assert client.get("/v1/files").json()["data"] == before


def test_a_key_beyond_ascii_is_sent_as_the_server_compares_it(tmp_path: Path) -> None:
    """In UTF-8, the last byte of which is here what Latin-1 has for a space."""
    key, arguments = "schlüssel à", ["jobs", "list", "--json"]
    with running_server(tmp_path / "data", env={"COTENANT_API_KEY": key}) as server:
        for given, code in ((key, 0), (key[:-1] + "á", 1)):
            result = CliRunner().invoke(app, [*arguments, "--url", server.base_url, "--api-key", given])
            assert result.exit_code == code, result.output


def test_pause_resume_cancel(server: RunningServer, training_file: Path) -> None:
    job_id = create(server, training_file, "-H", "n_epochs=50", "-H", "batch_size=1")
    wait_running(server, job_id)
    assert jobs(server, "pause", job_id).output.strip() == f"{job_id}: paused"
    assert jobs(server, "resume", job_id).output.split()[1] in ("queued", "running")
    assert jobs(server, "cancel", job_id).output.strip() == f"{job_id}: cancelled"
    watched = jobs(server, "watch", job_id)
    assert watched.exit_code == 1
    assert "cancelled" in watched.output.strip().splitlines()[-1]


def test_create_with_watch_shows_why_a_job_failed(server: RunningServer, tmp_path: Path) -> None:
    file = tmp_path / "short.jsonl"
    file.write_text('{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}\n' * 3)
    result = jobs(server, "create", str(file), "--model", "tiny", "--watch")
    assert result.exit_code == 1
    last = result.output.strip().splitlines()[-1]
    assert last.startswith("failed")
    assert "3 example" in last


def test_the_servers_own_words_are_shown(server: RunningServer) -> None:
    with pytest.raises(CotenantError, match="ftjob-none"):
        jobs(server, "show", "ftjob-none")


def test_a_missing_key_is_said(server: RunningServer) -> None:
    result = CliRunner().invoke(app, ["jobs", "list", "--url", server.base_url], env={"COTENANT_API_KEY": ""})
    assert isinstance(result.exception, CotenantError)
    assert "asks for an API key: give --api-key or COTENANT_API_KEY" in result.exception.message
    wrong = CliRunner().invoke(app, ["jobs", "list", "--url", server.base_url, "--api-key", "shazam"])
    assert isinstance(wrong.exception, CotenantError)
    assert "does not take this API key: check --api-key" in wrong.exception.message
