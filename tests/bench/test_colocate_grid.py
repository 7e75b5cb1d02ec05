"""bench/colocate_grid.py: targets side by side, one report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "bench" / "colocate_grid.py"
LOAD = ["--batch-sizes", "2", "--context", "40", "--num-tokens", "16", "--policies", "inference-only"]
TRAINING = ["--seq-len", "16", "--tokens-per-step", "16", "--alone-seconds", "0.5", "--device", "cpu"]


def grid(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--gpus", "2", "--json", str(path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_each_target_has_a_process_and_all_one_report(tmp_path: Path) -> None:
    path, page = tmp_path / "grid.json", tmp_path / "grid.html"
    result = grid(path, "--html", str(page), "--slo-tpot-ms", "0.001,10000", "tiny", *LOAD, *TRAINING)
    assert result.returncode == 0, result.stderr + (tmp_path / "grid-10000.log").read_text()
    report = json.loads(path.read_text())
    assert [(cell["slo"]["tpot_ms"], cell["attainment"]) for cell in report["cells"]] == [(0.001, 0.0), (10000, 1.0)]
    first, second = (run["command"] for run in report["runs"])
    assert "--slo-tpot-ms 0.001 " in first
    assert "--slo-tpot-ms 10000 " in second
    assert "averages are over 2 of 2 places" in result.stdout.lower()
    assert page.is_file()


def test_a_target_that_fails_is_named(tmp_path: Path) -> None:
    result = grid(tmp_path / "grid.json", "--slo-tpot-ms", "10", "no-such-model")
    assert result.returncode == 1
    assert f"10 ms failed: {tmp_path / 'grid-10.log'} says why" in result.stderr
    assert "unknown model 'no-such-model'" in (tmp_path / "grid-10.log").read_text()


def test_what_is_cut_off_says_so(tmp_path: Path) -> None:
    result = grid(tmp_path / "grid.json", "--seconds", "0.5", "--slo-tpot-ms", "10", "tiny", *LOAD, *TRAINING)
    assert result.returncode == 3
    assert "cut off: start it again to go on" in result.stderr
