"""What `cotenant demo` leaves behind, and what it leaves alone."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cotenant.bench import demo
from cotenant.bench.client import ServerError
from cotenant.bench.demo import Demo, DemoOptions
from cotenant.cli.main import app

REPORT = {"model": "tiny", "policy": "adaptive", "online": {}, "finetune": {}, "answers": {}}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """None can be started, so a demo has little to do."""

    def running_server(*_: object) -> Any:
        raise ServerError("no server")

    monkeypatch.setattr(demo, "running_server", running_server)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_report_and_the_log_stay_and_nothing_else(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_MIN_STEPS", 5)
    options = DemoOptions(tmp_path / "report", beside="", alone_s=1.0, training_alone_s=0.5, corun_s=1.0)
    report = asyncio.run(Demo(options, Console(file=io.StringIO())).run())
    assert report["finetune"]["num_steps"] >= 5
    left = content(tmp_path / "report")
    assert set(left) == {"report.json", "report.html", "server.log"}
    assert json.loads(left["report.json"]).keys() >= REPORT.keys()
    assert left["server.log"].count(b"cotenant is ready") == 2, "one after the other"
    assert list(temporary.iterdir()) == []


@pytest.mark.usefixtures("_no_server")
def test_an_earlier_demo_makes_way_and_files_of_others_stay(tmp_path: Path, temporary: Path) -> None:
    output = tmp_path / "report"
    (output / "data").mkdir(parents=True)
    (output / "report.json").write_text(json.dumps(REPORT))
    (output / "report.html").write_text("earlier")
    for name in ("notes.txt", "data/cotenant.db", ".hidden"):
        (output / name).write_text("mine")
    for _ in range(2):  # again, after one that has failed and has no report
        result = CliRunner().invoke(app, ["demo", "--output", str(output)])
        assert result.exit_code == 1, result.output
        assert f"no server; the server's log is {output / 'server.log'}" in result.stderr.replace("\n", "")
        left = content(output)
        assert left.pop("server.log").startswith(b"# ")
        assert left == dict.fromkeys(["notes.txt", "data/cotenant.db", ".hidden"], b"mine")
        assert list(temporary.iterdir()) == []


@pytest.mark.usefixtures("_no_server")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("server.log", "of another server"),
        ("report.json", json.dumps({"model": "mine"})),
        ("report.json", "[]"),
        ("report.json", "no JSON"),
        ("report.html", "<html>"),
        ("notes.txt", ""),
    ],
)
def test_a_folder_of_something_else_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    result = CliRunner().invoke(app, ["demo", "--output", str(tmp_path)])
    assert "is not a folder of an earlier demo and not empty" in str(result.exception)
    assert content(tmp_path) == {name: text.encode()}


def test_one_that_is_told_to_end_leaves_no_data(tmp_path: Path, temporary: Path) -> None:
    command = [sys.executable, "-m", "cotenant", "demo", "--output", str(tmp_path / "report")]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    deadline_s = time.monotonic() + 60
    while not list(temporary.glob("cotenant-demo-*/cotenant.db")):
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    assert not list(temporary.glob("cotenant-demo-*"))
