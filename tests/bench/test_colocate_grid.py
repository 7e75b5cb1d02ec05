"""bench/colocate_grid.py: targets side by side, one report."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from small_model import small_model

SCRIPT = Path(__file__).parents[2] / "bench" / "colocate_grid.py"
LOAD = ["--batch-sizes", "2", "--context", "40", "--num-tokens", "16", "--policies", "inference-only"]
TRAINING = ["--seq-len", "16", "--tokens-per-step", "16", "--alone-seconds", "0.5", "--device", "cpu"]


def grid(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--gpus", "2", "--json", str(path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_each_target_has_a_process_and_all_one_report(tmp_path: Path) -> None:
    path, page, model = tmp_path / "grid.json", tmp_path / "grid.html", small_model(tmp_path)
    flags = ["--html", str(page), "--slo-tpot-ms", "0.001,10000", "--trace-file", str(tmp_path / "trace.json")]
    result = grid(path, *flags, *model, *LOAD, *TRAINING)
    assert result.returncode == 0, result.stderr + (tmp_path / "grid-10000.log").read_text()
    report = json.loads(path.read_text())
    assert [(cell["slo"]["tpot_ms"], cell["attainment"]) for cell in report["cells"]] == [(0.001, 0.0), (10000, 1.0)]
    first, second = (run["command"] for run in report["runs"])
    assert "--slo-tpot-ms 0.001 " in first
    assert "--slo-tpot-ms 10000 " in second
    assert "averages are over 2 of 2 places" in result.stdout.lower()
    assert page.is_file()
    assert all((tmp_path / f"trace-{target}.json").is_file() for target in ("0.001", "10000"))


def test_a_target_that_fails_is_named(tmp_path: Path) -> None:
    result = grid(tmp_path / "grid.json", "--slo-tpot-ms", "10", "no-such-model")
    assert result.returncode == 1
    assert f"10 ms failed: {tmp_path / 'grid-10.log'} says why" in result.stderr
    assert "unknown model 'no-such-model'" in (tmp_path / "grid-10.log").read_text()


def test_what_is_cut_off_goes_on(tmp_path: Path) -> None:
    path, first = tmp_path / "grid.json", tmp_path / "grid-10.json"
    arguments = ["--slo-tpot-ms", "10,10", *small_model(tmp_path), *LOAD, *TRAINING]
    result = grid(path, "--seconds", "0.5", *arguments)
    assert result.returncode == 3
    assert "cut off: start it again to go on" in result.stderr
    assert grid(path, *arguments).returncode == 0
    (cell,) = json.loads(first.read_text())["cells"]
    assert grid(path, *arguments).returncode == 0
    assert json.loads(path.read_text())["cells"] == [cell], "measured once"


def test_it_takes_its_processes_along(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--gpus", "1", "--json", str(tmp_path / "grid.json")]
    script = subprocess.Popen([*command, *small_model(tmp_path), *LOAD, *TRAINING])
    until(lambda: psutil.Process(script.pid).children())
    (child,) = psutil.Process(script.pid).children()
    script.terminate()
    assert script.wait(120) == 128 + signal.SIGTERM
    until(lambda: not child.is_running())


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.05)


def test_more_gpus_than_it_may_use_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    result = grid(tmp_path / "grid.json", "tiny")
    assert result.returncode == 2
    assert "--gpus: 2 of CUDA_VISIBLE_DEVICES=5" in result.stderr
