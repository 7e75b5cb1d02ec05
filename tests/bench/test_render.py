"""Results become two pages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from bench.rendering import ROOT, render


def test_the_committed_pages_are_what_the_command_renders(tmp_path: Path) -> None:
    assert render("--target", str(tmp_path / "benchmarks.md")).returncode == 0
    for name in ("benchmarks.md", "benchmarks-earlier.md"):
        assert (tmp_path / name).read_text() == (ROOT / "docs" / name).read_text()


def test_every_link_to_a_heading_finds_it() -> None:
    """On the page itself, and on the other documents: what was measured earlier has a page of its own."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    headings = {
        page.name: {
            re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
            for line in page.read_text().splitlines()
            if line.startswith("#")
        }
        for page in pages
    }
    links = [
        (page.name, name.rpartition("/")[2] or page.name, heading)
        for page in pages
        for name, heading in re.findall(r"\]\(([\w/.-]*)#([^)\s]+)\)", page.read_text())
    ]
    assert len(links) > 50
    pairs = {link[:2] for link in links}
    assert {("benchmarks.md", "benchmarks-earlier.md"), ("benchmarks-earlier.md", "benchmarks.md")} <= pairs
    assert [link for link in links if link[2] not in headings[link[1]]] == []


def run_at(time_scale: float, ttft_ms: float, failed: int = 0) -> dict[str, Any]:
    return {
        "time_scale": time_scale,
        "offered_request_rate": 5 * time_scale,
        "completed": 90,
        "failed": failed,
        "failures": {"HTTP 503": failed} if failed else {},
        "p50_ttft_ms": ttft_ms,
        "p99_ttft_ms": 2 * ttft_ms,
        "p50_tpot_ms": 7.0,
        "p99_tpot_ms": None,
        "slo": {"ttft_ms": 500.0, "tpot_ms": None},
        "slo_attainment": 0.5,
        "request_throughput": 3.25,
        "output_throughput": 700.4,
        "generator": {"lag_ms": {"p50": 0.1, "p99": 1.26, "max": 3.0}},
    }


def result(label: str, *runs: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": "serve",
        "label": label,
        "command": "cotenant bench serve",
        "machine": {"cpu": "A CPU", "num_cores": 4, "gpus": ["A GPU"]},
        "versions": {"torch": "2.13.0"},
        "server_version": None,
        "model_id": "tiny",
        "trace": "conv.csv",
        "trace_window_s": [10.0, 610.0],
        "swept": "time_scale",
        "highest_sustained": 2.0,
        "runs": list(runs),
    }


def test_servers_stand_side_by_side(tmp_path: Path) -> None:
    results = [result("ours", run_at(1, 10), run_at(2, 20)), result("theirs", run_at(1, 30, failed=10))]
    (tmp_path / "serve_h200.json").write_text(json.dumps(results))
    target = tmp_path / "page.md"
    run = render("--results", str(tmp_path), "--target", str(target))
    assert run.returncode == 0, run.stderr
    page = target.read_text()
    assert "## Serve h200" in page
    (header, _, first, second) = [line for line in page.splitlines() if line.startswith("|")]
    assert header.startswith("| trace speed | TTFT p50 / p99, ms: ours | TTFT p50 / p99, ms: theirs |")
    assert first.startswith(
        "| 1 (5.00 requests/s) | 10.0 / 20.0 | 30.0 / 60.0 | 7.0 / - | 7.0 / - | 50.0% of 90 | 50.0% of 100 |"
    )
    assert second.startswith("| 2 (10.00 requests/s) | 20.0 / 40.0 | - |")
    assert "A CPU, 4 cores, A GPU, torch 2.13.0" in page
    assert "Highest trace speed with p99 within targets: 2." in page
    assert "The generator was at most 1.3 ms late at p99. 10 failed: HTTP 503." in page


def test_a_kind_that_nobody_renders_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"kind": "guess"}')
    run = render("--results", str(tmp_path), "--target", str(tmp_path / "page.md"))
    assert run.returncode == 1
    assert "its kind must be one of" in run.stderr


def spread(p50: float) -> dict[str, float]:
    return {"p50": p50, "p10": p50 - 0.1, "p90": p50 + 0.1, "p99": p50 + 0.2, "max": p50 + 0.3}


def engine_result(label: str, factor: float) -> dict[str, Any]:
    decode = {"batch_size": 8, "context": 545, "num_adapters": 0, "step_ms": spread(4.0 * factor), "floor_ms": 3.5}
    return {
        "kind": "engine",
        "label": label,
        "command": "cotenant bench engine",
        "model": "llama",
        "dtype": "bfloat16",
        "ceilings": {"copy_gb_s": 4200.4, "matmul_tflop_s": 786.2},
        "machine": {"cpu": "A CPU", "num_cores": 4, "gpus": ["A GPU"]},
        "versions": {"torch": "2.11.0"},
        "decode": [decode | {"gap_us": spread(13.0)}],
        "prefill": [{"num_tokens": 512, "prefill_ms": spread(12.0 * factor), "floor_ms": 9.0}],
    }


def test_engines_stand_side_by_side(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (results / "engine.json").write_text(json.dumps([engine_result("ours", 1.0), engine_result("theirs", 1.25)]))
    target = tmp_path / "page.md"
    assert render("--results", str(results), "--target", str(target)).returncode == 0
    page = target.read_text()
    assert "| decode 8, context 545 | 4.00 (3.90 to 4.10) | 5.00 (4.90 to 5.10) | 0.800 | 3.50 | 13 |" in page
    assert "| prompt of 512 | 12.00 (11.90 to 12.10) | 15.00 (14.90 to 15.10) | 0.800 | 9.00 | - |" in page
    assert "4200 GB/s" in page


def finetune_result(label: str, memory: dict[str, int]) -> dict[str, Any]:
    return {
        "kind": "finetune",
        "label": label,
        "command": "cotenant bench finetune",
        "model": "llama",
        "dtype": "bfloat16",
        "ceilings": {"copy_gb_s": 4200.4, "matmul_tflop_s": 786.2},
        "machine": {"cpu": "A CPU", "num_cores": 4, "gpus": ["A GPU"]},
        "versions": {"torch": "2.11.0"},
        "seq_len": 2048,
        "tokens_per_step": 16384,
        "micro_batch_tokens": 2048,
        "r": 16,
        "gradient_checkpointing": True,
        "flop_per_token": 32_119_980_032,
        "flop_per_token_multiplied": 30_018_633_728,
        "tokens_per_s": {"mean": 17000.4} | spread(17000.0),
        "share_of_matmul_rate": 0.6945,
        "share_of_matmul_rate_multiplied": 0.6491,
        "step_ms": spread(963.0),
        "captured": True,
        "uncut": {"cut_ms": spread(963.0), "uncut_ms": spread(961.0), "difference": 0.00208},
        "tasklet_ms": {"forward_mlp": {"count": 512, **spread(1.0)}, "optimizer": {"count": 20, **spread(5.0)}},
        "cpu_share": {"launching_thread": 0.9, "launching": 0.04, "process": 0.95},
        "memory": memory,
        "suspend": {"num_samples": 200, "latency_ms": spread(1.5), "noticed_ms": spread(0.5)},
        "discard": {"num_samples": 200, "latency_ms": spread(2.5)},
        "require": {
            "num_samples": 200,
            "num_bytes": 4 << 30,
            "latency_ms": spread(3.0),
            "unmapped_ms": spread(2.0),
            "mean_ms": 3.1,
            "unmapped_mib": spread(4096.0),
        },
    }


OTHERS_LACK = (
    "ceilings",
    "captured",
    "uncut",
    "share_of_matmul_rate",
    "share_of_matmul_rate_multiplied",
    "tasklet_ms",
    "cpu_share",
    "suspend",
    "discard",
    "require",
)


def test_training_by_itself_and_beside_others(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    on_gpu = finetune_result("gpu", {"peak_allocated_bytes": 22 << 30, "peak_reserved_bytes": 24 << 30})
    on_cpu = finetune_result("cpu", {"peak_resident_bytes": 3 << 30}) | {"captured": False, "require": None}
    old = on_gpu | {"label": "old", "require": {**on_gpu["require"]}}
    del old["require"]["unmapped_ms"]  # measured until memory was unmapped, and no further
    other = finetune_result("peft", {"peak_allocated_bytes": 30 << 30}) | {"best": True}
    other |= {"tokens_per_s": {"mean": 15000.0}, "versions": {"torch": "2.11.0", "peft": "0.18.0"}}
    other = {name: value for name, value in other.items() if name not in OTHERS_LACK}
    (results / "finetune.json").write_text(json.dumps([on_gpu, on_cpu, old, other]))
    target = tmp_path / "page.md"
    run = render("--results", str(results), "--target", str(target))
    assert run.returncode == 0, run.stderr
    page = target.read_text()
    start, end = (
        "gradient checkpointing | 2,048 | 17,000 | 69.5% (64.9%) | 963.00 (962.90 to 963.10) |",
        "90.0%, launching 4.0% | 1.000 |",
    )
    assert f"| gpu, {start} 22.0, reserved 24.0 | {end}" in page
    assert f"| cpu, {start} 3.0 | {end}" in page
    assert "| 2,048 | **15,000** | - | 963.00 (962.90 to 963.10) | 30.0 | - | 1.133 |" in page
    assert "32.1 GFLOP a token" in page
    assert "With peft 0.18.0." in page
    assert "| gpu, gradient checkpointing | 2,048 | yes | +0.21% | 4.0 | 4.00 | 2.00 | 3.10 |" in page
    assert "| old, gradient checkpointing | 2,048 | yes | +0.21% | 4.0 | 4.00 | 3.00 | - |" in page
    assert "| cpu, gradient checkpointing | 2,048 | no | +0.21% | - | - | - | - |" in page
    optimizer = (
        "| gpu, gradient checkpointing | 2,048 | tasklet: optimizer | 20 | 5.000 | 4.900 | 5.100 | 5.200 | 5.300 |"
    )
    assert optimizer in page
    assert "| cpu, gradient checkpointing | 2,048 | suspend | 200 | 1.500 |" in page
    assert "| gpu, gradient checkpointing | 2,048 | require | 200 | 3.000 |" in page
    assert "| cpu, gradient checkpointing | 2,048 | require |" not in page


def test_training_of_others_alone_has_one_table(tmp_path: Path) -> None:
    other = finetune_result("peft", {"peak_allocated_bytes": 30 << 30})
    other = {name: value for name, value in other.items() if name not in OTHERS_LACK}
    (tmp_path / "finetune.json").write_text(json.dumps([other]))
    target = tmp_path / "page.md"
    assert render("--results", str(tmp_path), "--target", str(target)).returncode == 0
    (header,) = [line for line in target.read_text().splitlines() if line.startswith("|---")]
    assert header.count("---") == 7


def test_a_resize_says_what_it_cost(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    report = {
        "kind": "resize",
        "command": "python bench/resize_under_load.py",
        "model": "llama",
        "batch_size": 64,
        "context": 1024,
        "machine": {"cpu": "A CPU", "num_cores": 4, "gpus": []},
        "versions": {"torch": "2.11.0"},
        "num_resizes": 12,
        "resized_gib": 96.0,
        "num_pages_moved": 1500,
        "num_tokens": 25600,
        "undisturbed_step_ms": spread(7.0),
        "resizing_step_ms": spread(9.0),
        "passed": False,
        "problems": ["a token differs from the undisturbed run's"],
    }
    (results / "resize.json").write_text(json.dumps(report))
    target = tmp_path / "page.md"
    assert render("--results", str(results), "--target", str(target)).returncode == 0
    page = target.read_text()
    assert "| resizing | 9.00 | 9.20 | 9.30 |" in page
    assert "**failed: a token differs" in page
