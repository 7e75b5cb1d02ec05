"""`cotenant bench colocate` on the built-in model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.0,20,12
2023-11-16 18:15:46.5,33,1
2023-11-16 18:15:46.6,5000,9
2023-11-16 18:15:47.5,8,20
"""
TRAINING = ["--seq-len", "16", "--tokens-per-step", "16", "--alone-seconds", "0.5", "--device", "cpu"]


def bench_colocate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cotenant", "bench", "colocate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_what_requests_wait_and_what_training_gets(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    path = tmp_path / "colocate.json"
    load = ["--batch-sizes", "3", "--context", "40", "--num-tokens", "16", "--trace", str(tmp_path / "trace.csv")]
    targets = ["--slo-tpot-ms", "1,10000", "--slo-ttft-ms", "60000", "--policies", "multitask,inference-only"]
    result = bench_colocate("tiny", *TRAINING, *load, *targets, "--json", str(path))
    assert result.returncode == 0, result.stderr
    report = json.loads(path.read_text())
    assert (report["kind"], report["model"]) == ("colocate", "tiny")
    assert report["train_alone_tokens_per_s"] > 0
    cells = report["cells"]
    assert [(cell["load"], cell["slo"]["tpot_ms"], cell["policy"]) for cell in cells] == [
        (load, tpot_ms, policy)
        for load in ("steady", "trace")
        for tpot_ms in (1, 10000)
        for policy in ("multitask", "inference-only")
    ]
    for cell in cells:
        assert cell["num_failed"] == 0
        assert 0 < cell["itl_ms"]["p50"] <= cell["itl_ms"]["p99"]
        assert cell["num_requests"] == 3, "the one that is too long for the model is left out"
        assert (cell["ttft_ms"] is None) == (cell["load"] == "steady")
        if cell["policy"] == "inference-only":
            assert cell["harvest"] == 0.0
            assert set(cell["iterations"]) == {"none"}
    relaxed = cells[2]
    assert relaxed["iterations"]["temporal"] > 0, "with such targets training runs beside every step"
    assert relaxed["harvest"] > 0
    assert relaxed["attainment"] == 1.0
    expected = relaxed["train_tokens_per_s"] / report["train_alone_tokens_per_s"]
    assert relaxed["harvest"] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--policies", "multitask,fastest"], "--policy: must be one of multitask"),
        (["--slo-tpot-ms", "10,fast"], "--slo-tpot-ms: expected numbers above 0"),
        (["--batch-sizes", ""], "--batch-sizes or --trace"),
        (["--batch-sizes", "0.5"], "--batch-sizes: expected whole numbers"),
        (["--seq-len", "5000"], "--seq-len: 5000 is too long: tiny takes 1024 tokens"),
        (["--seq-len", "48", "--tokens-per-step", "64"], "--tokens-per-step: 64 is not a multiple of --seq-len 48"),
        (["--trace", "/no/such/file", "--batch-sizes", ""], "--trace: /no/such/file cannot be read"),
        (
            ["--context", "1000", "--num-tokens", "400"],
            "take up to 1792; the model takes 1024",
        ),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], complaint: str) -> None:
    result = bench_colocate("tiny", *TRAINING, *arguments)
    assert result.returncode == 2
    assert complaint in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
