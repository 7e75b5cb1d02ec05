"""What `cotenant bench colocate --resume` goes on with, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.colocation import SHORT, TRAINING, bench_colocate
from cotenant.cli.main import app
from cotenant.runtime.colocate_bench import ColocateBench
from cotenant.runtime.colocate_cell import Cell
from small_model import small_model


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    arguments = [*small_model(tmp_path), *TRAINING, "--batch-sizes", "2", "--context", "40", "--num-tokens", "16"]
    arguments += ["--slo-tpot-ms", "10000", "--policies", "inference-only,whole-step", "--json", str(path)]
    first = bench_colocate(*arguments, "--resume")
    assert first.returncode == 0
    assert f"--resume: {path} is not there yet, so all is measured" in first.stderr
    whole = json.loads(path.read_text())
    kept, lost = whole["cells"]
    path.write_text(json.dumps({**whole, "cells": [kept]}))
    again = bench_colocate(*arguments, "--resume")
    assert again.returncode == 0, again.stderr
    assert "is not there yet" not in again.stderr
    resumed = json.loads(path.read_text())
    assert resumed["cells"][0] == kept
    assert resumed["cells"][1]["policy"] == lost["policy"]
    assert resumed["cells"][1]["timeline"] != lost["timeline"]
    assert resumed["runs"][0] == {name: whole[name] for name in ("command", "train_alone_tokens_per_s")}
    assert resumed["runs"][1]["train_alone_tokens_per_s"] == resumed["train_alone_tokens_per_s"]
    assert bench_colocate(*arguments, "--resume").returncode == 0
    assert json.loads(path.read_text()) == resumed, "nothing was left to measure"
    others = [each for each in arguments if each not in ("--load-format", "dummy")]
    real = bench_colocate(*others, "--resume")
    assert real.returncode == 2
    assert "--load-format: the file of --json has dummy, not auto; --resume goes on with the same" in real.stderr


def test_another_part_of_a_trace_is_measured_too(tmp_path: Path) -> None:
    rows = [f"2023-11-16 18:15:4{second}.{tenth},12,4" for second in (0, 1) for tenth in (0, 5)]
    (tmp_path / "conv.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    path, page = tmp_path / "grid.json", tmp_path / "grid.html"
    arguments = [*small_model(tmp_path), *TRAINING, "--batch-sizes", "", "--trace", str(tmp_path / "conv.csv")]
    arguments += ["--min-requests", "1", "--slo-tpot-ms", "10000", "--policies", "inference-only"]
    arguments += ["--learning-seconds", "0.1", "--json", str(path), "--html", str(page), "--resume"]
    for window in ("0:1", "1:2", "0:1"):
        result = bench_colocate(*arguments, "--window", window)
        assert result.returncode == 0, result.stderr
    cells = json.loads(path.read_text())["cells"]
    assert [cell["window_s"] for cell in cells] == [[0.0, 1.0], [1.0, 2.0]]
    assert cells[0]["request_rate"] == cells[1]["request_rate"]
    assert all(f"conv (from {second} s) x 1 at 10000 ms" in page.read_text() for second in (0, 1))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_tells_what_it_has_and_goes_on(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, page, measure = tmp_path / "grid.json", tmp_path / "grid.html", ColocateBench.steady
    arguments = [*small_model(tmp_path), *TRAINING, "--batch-sizes", "2", "--context", "40", "--num-tokens", "16"]
    arguments += ["--slo-tpot-ms", "10000", "--policies", "inference-only,whole-step", "--json", str(path)]

    def interrupted(self: ColocateBench, policy: str, *rest: Any) -> Cell:
        if policy == "whole-step":
            if number is signal.SIGINT:  # which a program in the background ignores
                raise KeyboardInterrupt
            os.kill(os.getpid(), number)
        return measure(self, policy, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(ColocateBench, "steady", interrupted)
        result = CliRunner().invoke(app, ["bench", "colocate", *arguments, "--html", str(page)])
    assert result.exit_code == 130
    said = result.stderr.strip().splitlines()[-1]
    assert said == "error: interrupted: 1 cell measured; --resume goes on with them"
    assert page.exists()
    (kept,) = json.loads(path.read_text())["cells"]
    assert bench_colocate(*arguments, "--resume").returncode == 0
    resumed = json.loads(path.read_text())["cells"]
    assert resumed[0] == kept
    assert [cell["policy"] for cell in resumed] == ["inference-only", "whole-step"]
    assert bench_colocate(*arguments).returncode == 0, "anew: what was there is kept"
    assert json.loads((tmp_path / "grid.json.old").read_text())["cells"] == resumed


def test_a_run_that_is_interrupted_before_it_has_measured_anything_says_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Cell:
        raise KeyboardInterrupt

    monkeypatch.setattr(ColocateBench, "steady", interrupted)
    arguments = [*small_model(tmp_path), *TRAINING, "--batch-sizes", "2", "--context", "40", "--num-tokens", "16"]
    arguments += ["--slo-tpot-ms", "10000", "--policies", "inference-only", "--html", str(tmp_path / "grid.html")]
    result = CliRunner().invoke(app, ["bench", "colocate", *arguments])
    assert result.exit_code == 130
    assert result.stderr.strip().splitlines()[-1] == "error: interrupted before anything was measured"
    assert "Averages" not in result.stdout
    assert not (tmp_path / "grid.html").exists()


def test_a_run_does_not_go_on_with_what_was_measured_otherwise(tmp_path: Path) -> None:
    (tmp_path / "short.csv").write_text(SHORT)
    path = tmp_path / "grid.json"
    flags = [*small_model(tmp_path), *TRAINING, "--batch-sizes", "", "--min-requests", "1", "--slo-tpot-ms", "10000"]
    flags += ["--policies", "inference-only", "--json", str(path), "--trace"]
    assert bench_colocate(*flags, str(tmp_path / "short.csv")).returncode == 0
    before = path.read_bytes()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "short.csv").write_text(SHORT.replace(",4", ",7"))
    refused = bench_colocate(*flags, str(tmp_path / "other" / "short.csv"), "--resume")
    assert refused.returncode == 2
    complaint = "the file of --json was measured with another trace that is named short; rename this one"
    assert refused.stderr == f"error: --trace: {complaint}\n"
    for flag, given, known in (  # also where nothing is left to measure
        ("--learning-seconds", "3.0", "8.0"),
        ("--max-model-len", "500", "0"),
        ("--rounds", "3", "1"),
        ("--seq-len", "8", "16"),
        ("--r", "4", "16"),
        ("--dtype", "bfloat16", "float32"),
        ("--compress-weights", "on", "off"),
    ):
        refused = bench_colocate(*flags, str(tmp_path / "short.csv"), "--resume", flag, given)
        assert refused.returncode == 2, flag
        complaint = f"error: {flag}: the file of --json has {known}, not {given}; --resume goes on with the same"
        assert refused.stderr.splitlines()[-1] == complaint
    assert path.read_bytes() == before
    for dtype in ("float32", "float", "auto"):
        assert bench_colocate(*flags, str(tmp_path / "short.csv"), "--resume", "--dtype", dtype).returncode == 0
    # What this device would do by itself is not asked: weights are read as they were.
    path.write_text(json.dumps({**json.loads(before), "compressed": True, "cells": []}))
    refused = bench_colocate(*flags, str(tmp_path / "short.csv"), "--resume")
    assert (refused.returncode, "--compress-weights on: needs an NVIDIA GPU" in refused.stderr) == (2, True)
