"""`cotenant bench finetune` on the built-in model."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from cotenant.cli.bench_finetune import choose_rows
from forked import run_command
from small_model import small_model


def bench_finetune(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("bench", "finetune", *arguments)


def test_figures_agree_with_each_other(tmp_path: Path) -> None:
    path = tmp_path / "finetune.json"
    sizes = ["--seq-len", "32", "--tokens-per-step", "192", "--tasklet-tokens", "80", "--r", "4"]
    counts = ["--steps", "3", "--warmup-steps", "1", "--samples", "12"]
    result = bench_finetune(
        "tiny", *sizes, *counts, "--gradient-checkpointing", "--device", "cpu", "--label", "ours", "--json", str(path)
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(path.read_text())
    assert (report["kind"], report["label"], report["model"]) == ("finetune", "ours", "tiny")
    assert (report["dtype"], report["r"], report["gradient_checkpointing"]) == ("float32", 4, True)
    # Whole sequences: two of 32 tokens go into 80.
    assert (report["micro_batch_tokens"], report["num_micro_batches"]) == (64, 3)

    tasklets = report["tasklet_ms"]
    num_layers = tasklets["forward"]["count"] // (3 * 3)
    counted = {kind: times["count"] for kind, times in tasklets.items()}
    assert counted == {
        "forward": 9 * num_layers,
        "loss": 9,
        "recompute": 9 * (num_layers - 1),
        "backward": 9 * num_layers,
        "optimizer": 3,
    }
    assert report["num_recomputed_layers"] == num_layers - 1
    for times in (
        report["step_ms"],
        *tasklets.values(),
        *(report[key]["latency_ms"] for key in ("suspend", "discard")),
    ):
        assert 0 < times["p10"] <= times["p50"] <= times["p90"] <= times["p99"] <= times["max"]

    # The slowest of three steps and the fastest enclose what the whole took.
    fastest, slowest = report["tokens_per_s"]["max"], 192e3 / report["step_ms"]["max"]
    assert slowest * 0.99 <= report["tokens_per_s"]["mean"] <= fastest * 1.01
    assert slowest * 0.99 <= report["tokens_per_s"]["p10"] <= report["tokens_per_s"]["p50"] <= fastest
    matmul_flop_s = report["ceilings"]["matmul_tflop_s"] * 1e12
    used_flop_s = report["tokens_per_s"]["mean"] * report["flop_per_token"]
    assert report["share_of_matmul_rate"] == pytest.approx(used_flop_s / matmul_flop_s, abs=1e-4)
    assert 0 < report["cpu_share"]["launching"] <= report["cpu_share"]["launching_thread"] <= 1.01
    assert report["memory"]["peak_resident_bytes"] > 50 << 20
    assert report["suspend"]["num_samples"] == report["discard"]["num_samples"] == 12
    # A CPU is idle once the stop is noticed.
    assert report["suspend"]["noticed_ms"]["max"] <= report["suspend"]["latency_ms"]["max"]
    assert "tasklet: backward" in result.stdout
    assert result.stderr.splitlines() == [
        "loading tiny, and timing the device",
        "warming up: 1 step",
        "timing 3 steps",
        "uncut: 3 pairs of steps",
        "suspend: 12 samples",
        "discard: 12 samples",
    ]


def test_rows_are_as_long_as_a_small_model_takes(tmp_path: Path) -> None:
    path = tmp_path / "finetune.json"
    counts = ["--steps", "1", "--warmup-steps", "0", "--samples", "1", "--r", "2"]
    result = bench_finetune(*small_model(tmp_path, 1000), *counts, "--device", "cpu", "--json", str(path))
    assert result.returncode == 0, result.stderr
    report = json.loads(path.read_text())
    assert (report["seq_len"], report["tokens_per_step"]) == (1000, 2000)


@pytest.mark.parametrize(
    ("limit", "seq_len", "tokens_per_step", "chosen"),
    [
        (131072, None, None, (2048, 16384)),
        (131072, 4096, None, (4096, 16384)),
        (131072, 3000, None, (3000, 15000)),
        (131072, 32768, None, (32768, 32768)),
        (1024, None, 2048, (1024, 2048)),
    ],
)
def test_what_is_not_given_is_as_usual_in_whole_rows(
    limit: int, seq_len: int | None, tokens_per_step: int | None, chosen: tuple[int, int]
) -> None:
    assert choose_rows("model", limit, seq_len, tokens_per_step, 16384) == chosen


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["tiny", "--seq-len", "1025"], "--seq-len: 1025 is too long: tiny takes 1024 tokens"),
        (["tiny", "--seq-len", "48", "--tokens-per-step", "100"], "--tokens-per-step: 100 is not a multiple of"),
        (["tiny", "--seq-len", "64", "--min-len", "65"], "--min-len: 65 is more than --seq-len 64"),
        (["no-such-model"], "unknown model 'no-such-model'"),
        (["tiny", "--dtype", "int8"], "--dtype"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], complaint: str) -> None:
    result = bench_finetune(*arguments)
    assert result.returncode == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert complaint in line


def test_sequences_of_random_lengths_are_packed(tmp_path: Path) -> None:
    path = tmp_path / "finetune.json"
    sizes = ["--seq-len", "64", "--min-len", "8", "--tokens-per-step", "256", "--tasklet-tokens", "128", "--r", "4"]
    counts = ["--steps", "2", "--warmup-steps", "1", "--samples", "2"]
    result = bench_finetune("tiny", *sizes, *counts, "--device", "cpu", "--json", str(path))
    assert result.returncode == 0, result.stderr
    report = json.loads(path.read_text())
    assert report["min_len"] == 8
    assert 64 < report["micro_batch_tokens"] <= 128
    assert 0.6 * 2 * 256 < report["trained_tokens"] < 2 * 256, "rows are full, but not quite"


def test_less_memory_makes_layers_be_recomputed_and_too_little_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    flags = ["--seq-len", "128", "--tokens-per-step", "256", "--tasklet-tokens", "128", "--device", "cpu"]
    flags += ["--steps", "1", "--warmup-steps", "0", "--samples", "1", "--json", str(path)]
    numbers = []
    for gib in ("0.03", "0.01"):
        result = bench_finetune("tiny", *flags, "--activation-memory", gib)
        assert result.returncode == 0, result.stderr
        report = json.loads(path.read_text())
        assert report["micro_batch_tokens"] == 128
        numbers.append(report["num_recomputed_layers"])
    assert numbers[0] < numbers[1]
    result = bench_finetune("tiny", *flags, "--activation-memory", "0.001")
    assert result.returncode != 0
    said = " ".join(result.stderr.split())
    assert "--activation-memory: The job needs" in said
    assert "are lacking. Raise it, or lower --seq-len or --r." in said
