"""`cotenant bench engine` on the built-in model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cotenant.cli import bench_engine as bench_engine_command
from cotenant.cli.main import app
from cotenant.runtime import engine_bench
from forked import run_command
from small_model import small_model


def bench_engine(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("bench", "engine", *arguments)


def test_figures_and_their_floor(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    flags = ["--batch-sizes", "1,3", "--context", "48", "--prompt-lengths", "24", "--num-steps", "8", "--repeats", "2"]
    result = bench_engine(
        "tiny", *flags, "--num-adapters", "2", "--lora-batch-size", "3", "--device", "cpu", "--json", str(path)
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(path.read_text())
    assert (report["kind"], report["model"], report["dtype"]) == ("engine", "tiny", "float32")
    assert [(row["batch_size"], row["num_adapters"]) for row in report["decode"]] == [(1, 0), (3, 0), (3, 0), (3, 2)]
    for row, key in [*((row, "step_ms") for row in report["decode"]), (report["prefill"][0], "prefill_ms")]:
        assert 0 < row[key]["p10"] <= row[key]["p50"] <= row[key]["p90"]
        assert row["ratio_to_floor"] == pytest.approx(row[key]["p50"] / row["floor_ms"], rel=0.01)
        assert row["ratio_to_floor"] > 0.5
    assert report["ceilings"]["copy_gb_s"] > 0.1
    assert "prompt of" in result.stdout
    assert result.stderr.splitlines() == [
        "loading tiny, and timing the device",
        "decode: batches of 1, 8 steps timed",
        "decode: batches of 3, 8 steps timed",
        "prompts of 24 tokens: 2 timed",
        "decode: batches of 3, 8 steps timed",
        "decode: batches of 3 with 2 adapters, 8 steps timed",
    ]


def test_figures_are_written_before_they_are_printed(tmp_path: Path) -> None:
    """Whoever reads what is printed may be gone."""
    path = tmp_path / "engine.json"
    flags = ["--batch-sizes", "1", "--context", "16", "--prompt-lengths", "8", "--num-steps", "8", "--repeats", "1"]
    command = [sys.executable, "-m", "cotenant", "bench", "engine", "tiny", *flags, "--json", str(path)]
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=120, check=False)
    os.close(writer)
    assert result.returncode == 1
    assert json.loads(path.read_text())["decode"][0]["batch_size"] == 1


def test_what_is_timed_without_flags_ends_soon_on_a_cpu() -> None:
    result = bench_engine("tiny", "--context", "48", "--num-steps", "8", "--repeats", "1", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines() == [
        "loading tiny, and timing the device",
        *(f"decode: batches of {size}, 8 steps timed" for size in (1, 8, 32)),
        "prompts of 512 tokens: 1 timed",
    ]


@pytest.mark.parametrize(("limit", "lengths"), [(8192, [512, 2048, 4000]), (4000, [512, 2048]), (500, [499])])
def test_what_is_timed_without_flags_on_cuda(
    limit: int, lengths: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    decoded: list[int] = []
    prompts: list[int] = []

    def timed(asked: list[int]) -> Any:
        return lambda size, *rest: asked.append(size) or {}

    bench = SimpleNamespace(decode=timed(decoded), prefill=timed(prompts), description=dict)
    monkeypatch.setattr(engine_bench, "open_bench", lambda config: bench)
    monkeypatch.setattr(bench_engine_command, "_print", lambda report: None)
    flags = ["--context", "10", "--num-steps", "8"]
    result = CliRunner().invoke(app, ["bench", "engine", *small_model(tmp_path, limit), *flags])
    assert result.exit_code == 0, result.output
    assert decoded == [1, 8, 32, 128, 256]
    assert prompts == lengths


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["tiny", "--batch-sizes", "1,x"], "--batch-sizes: expected numbers like 1,8,32"),
        (["tiny", "--prompt-lengths", "0"], "--prompt-lengths"),
        (["tiny", "--prompt-lengths", "24,1024"], "--prompt-lengths: 1024 is too long: tiny takes 1024 tokens"),
        (["tiny", "--batch-sizes", "8", "--context", "1000"], "64 steps of 8 sequences leave 912"),
        (["no-such-model"], "unknown model 'no-such-model'"),
        (["tiny", "--quantization", "fp8", "--device", "cpu"], "quantization"),
        (["tiny", "--quantization", "int3"], "--quantization"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], complaint: str) -> None:
    result = bench_engine(*arguments)
    assert result.returncode == 2
    (line,) = [each for each in result.stderr.strip().splitlines() if not each.startswith("loading ")]
    assert line.startswith("error: ")
    assert complaint in line


def test_a_rank_that_is_not_taken_is_refused_by_the_name_of_its_flag() -> None:
    result = bench_engine("tiny", "--num-adapters", "2", "--lora-rank", "513")
    assert result.returncode == 2
    assert "Invalid value for '--lora-rank': Input should be less than or equal to 512" in result.stderr
