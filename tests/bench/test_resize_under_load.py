"""bench/resize_under_load.py on the built-in model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forked import run_script

ROOT = Path(__file__).parents[2]


def resize(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    path = folder / "resize.json"
    sizes = ["--batch-size", "8", "--context", "128", "--steps", "40", "--gib", "0.03", "--json", str(path)]
    run = run_script(ROOT / "bench" / "resize_under_load.py", "tiny", "--device", "cpu", *sizes, *arguments)
    assert path.exists(), run.stdout + run.stderr
    return run.returncode, json.loads(path.read_text()), run.stdout


def test_nothing_changes_while_pages_in_use_move(tmp_path: Path) -> None:
    code, report, printed = resize(tmp_path, "--max-p99-ms", "10000")
    assert (code, report["problems"]) == (0, []), printed
    assert "passed" in printed
    assert report["kind"] == "resize"
    assert report["tokens_equal"]
    assert report["pages_equal"]
    assert report["num_tokens"] == 8 * 40
    assert report["num_pages_compared"] >= 8 * (128 // 16)
    assert report["num_pages_moved"] > 8
    assert report["num_resizes"] >= 10
    assert report["resized_gib"] > 0.02 * report["num_resizes"]
    for key in ("undisturbed_step_ms", "resizing_step_ms"):
        assert 0 < report[key]["p50"] <= report[key]["p99"] <= report[key]["max"]
    assert set(report["machine"]) == {"cpu", "num_cores", "gpus"}
    assert "resize_under_load.py tiny" in report["command"]


def test_a_p99_that_is_too_much_longer_is_a_reason_and_an_exit_code(tmp_path: Path) -> None:
    code, report, printed = resize(tmp_path, "--max-p99-ms", "-10000", "--steps", "4")
    assert code == 1
    (problem,) = report["problems"]
    assert problem.endswith("more than -10000 ms")
    assert "FAILED: p99" in printed
