"""Results become two pages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cotenant.bench.comparison import compare

ROOT = Path(__file__).parents[2]


def render(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "bench" / "render.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


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


def colocate_cell(policy: str, harvest: float, attainment: float | None, **more: Any) -> dict[str, Any]:
    latency = {"p50": 5.0, "p90": 8.0, "p99": None, "mean": 5.5}
    return {
        "load": "trace",
        "trace": "conv",
        "format": "azure",
        "time_scale": 0.5,
        "policy": policy,
        "slo": {"ttft_ms": 500.0, "tpot_ms": 40.0},
        "duration_s": 60.0,
        "num_requests": 90,
        "attainment": attainment,
        "ttft_ms": latency,
        "tpot_ms": {**latency, "p99": 9.25},
        "itl_ms": None,
        "train_tokens_per_s": 1000 * harvest,
        "harvest": harvest,
        "prediction_error": {"alone": None, "co_run": {"mean": 0.021, "p95": 0.08, "iterations": 40}},
        **more,
    }


def colocated(cells: list[dict[str, Any]]) -> dict[str, Any]:
    result = {
        "kind": "colocate",
        "command": "cotenant bench colocate tiny",
        "model": "tiny",
        "dtype": "float32",
        "machine": {"cpu": "A CPU", "num_cores": 4, "gpus": []},
        "versions": {"torch": "2.13.0"},
        "training": {"seq_len": 16, "tokens_per_step": 32, "r": 16},
        "train_alone_tokens_per_s": 1000.0,
        "cells": cells,
    }
    return {**result, "comparison": compare(result, 0.99)}


def test_the_page_begins_with_what_a_job_gets_and_where_the_rest_is(tmp_path: Path) -> None:
    """Of places where serving alone is in time; a job that makes requests late has no speed to speak of."""
    results, target = tmp_path / "results", tmp_path / "page.md"
    results.mkdir()
    figures = {
        (1.0, 40.0): {
            "inference-only": (0.0, 1.0),
            "adaptive": (0.65, 1.0),
            "chunked": (0.6, 1.0),
            "static": (0.7, 0.5),
        },
        (1.0, 10.0): {"inference-only": (0.0, 1.0), "adaptive": (0.4, 0.95)},
        (4.0, 10.0): {"inference-only": (0.0, 0.5), "adaptive": (0.3, 1.0)},
    }
    cells = [
        colocate_cell(
            policy, *both, time_scale=scale, slo={"ttft_ms": 500.0, "tpot_ms": tpot_ms}, request_rate=5.26 * scale
        )
        for (scale, tpot_ms), policies in figures.items()
        for policy, both in policies.items()
    ]
    grid = colocated(cells)
    (results / "colocate_grid_h200.json").write_text(json.dumps(grid))
    (results / "colocate_a_gpu's.json").write_text(json.dumps(grid))
    assert render("--results", str(results), "--target", str(target)).returncode == 0
    short, _, rest = target.read_text().partition("## Contents")
    rows = [line for line in short.splitlines() if line.startswith("| conv")]
    latencies = "5.0 / - | 5.0 / - | 5.0 / 9.2 | 5.0 / 9.2"
    assert rows == [
        f"| conv x 1, 5.3 requests/s | 10 | 100.0% of 90 | 95.0% of 90 | {latencies} | 40.0%, too late | - |",
        f"| conv x 1, 5.3 requests/s | 40 | 100.0% of 90 | 100.0% of 90 | {latencies} | **65.0%** | `chunked` 60.0% |",
    ]
    assert "- [Colocate a gpu's](#colocate-a-gpus)" in rest
    assert "## Colocate a gpu's" in rest


def device_time(*, prompts: float) -> dict[str, float]:
    shares = {"prompts_shared": 0.0, "decode_alone": 0.02, "decode_shared": 0.1, "training_alone": 0.7, "rest": 0.03}
    return {"prompts_alone": prompts, **shares, "training_work": 0.7}


def test_policies_beside_a_load_and_how_they_compare(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    result = colocated(
        [
            colocate_cell("inference-only", 0.0, 1.0, device_time=device_time(prompts=0.1), harvest_of_runs=[0.0]),
            colocate_cell("adaptive", 0.75, 1.0, device_time=device_time(prompts=0.15)),
            colocate_cell("static", 0.8, 0.5, device_time=device_time(prompts=0.15), harvest_of_runs=[0.82, 0.78, 0.8]),
            colocate_cell("temporal", 0.5, 1.0, device_time=device_time(prompts=0.12)),
            colocate_cell("idle", 0.9, None, num_requests=0, time_scale=2.0),
        ]
    )
    (results / "colocate.json").write_text(json.dumps(result))
    target = tmp_path / "page.md"
    assert render("--results", str(results), "--target", str(target)).returncode == 0
    page = target.read_text()
    row = "| conv trace, 0.5 x, 60 s | 40 | `adaptive` | **75.0%** | 100.0% of 90 | 5.0 / - | 5.0 / 9.2 | - | "
    assert row + "-, 2.1% (8.0%) |" in page
    row = "| conv trace, 0.5 x, 3 runs of 20 s | 40 | `static` | 80.0% (78.0% to 82.0%) | 50.0% of 90 |"
    assert row in page
    assert "| `idle` | 90.0% | - |" in page
    assert "| `inference-only` | 0.0% | 100.0% of 90 |" in page
    assert "| conv x 0.5 at 40 ms | `adaptive` | 75.0% | 15.0% | 2.0% | 5.0% | 0.0% | 3.0% | 90.0% |" in page
    assert "| conv x 0.5 at 40 ms | `temporal` | 50.0% | 12.0% |" in page, "the best other that meets the SLO"
    assert "| conv x 0.5 at 40 ms | `static` |" not in page
    assert "- Two GPUs under a trace at 1 times its rate, both with adaptive" in page


def _without_figures(result: Any) -> Any:
    """The same without what only an HTML report draws, which is most of it."""
    if isinstance(result, list):
        return [_without_figures(each) for each in result]
    if not isinstance(result, dict):
        return result
    return {name: _without_figures(value) for name, value in result.items() if name not in ("cdf", "timeline")}


def _place_of(cell: dict[str, Any]) -> tuple[str, float, float]:
    return cell["trace"], cell["time_scale"], cell["slo"]["tpot_ms"]


def test_what_was_aimed_at_is_met_or_missed_by_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from renderers import targets

    for kind in ("grid", "steady", "predicted", "again", "half", "rest", "code_half", "between"):
        name = f"colocate_{kind}_h200.json"
        (tmp_path / name).write_text(
            json.dumps(_without_figures(json.loads((ROOT / "bench" / "results" / name).read_text())))
        )
    grid = json.loads((tmp_path / "colocate_grid_h200.json").read_text())
    (ours,) = [cell for cell in grid["cells"] if (cell["policy"], _place_of(cell)) == ("adaptive", ("conv", 1.0, 40.0))]
    load = "conversation at its own rate, 40 ms"

    def aims() -> dict[str, list[str]]:
        grid["comparison"] = compare(grid, 0.99)
        (tmp_path / "colocate_grid_h200.json").write_text(json.dumps(grid))
        text = targets.section(tmp_path)[-1]
        rows = [[part.strip() for part in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
        return {f"{row[0]}: {row[1]}": row[2:] for row in rows}

    ours["harvest"] = 0.74
    measured, verdict, why = aims()[f"{load}: harvest 75%"]
    assert (measured, verdict) == ("74.0%", "**missed**")
    assert why
    ours["harvest"] = 0.75
    assert aims()[f"{load}: harvest 75%"] == ["75.0%", "met", ""]
    aim = f"{load}: TTFT p99 500 ms, TPOT p99 40 ms"
    ours["ttft_ms"]["p99"], ours["tpot_ms"]["p99"] = 500.0, 40.0
    assert aims()[aim] == ["TTFT p99 500 ms, TPOT p99 40.0 ms", "met", ""]
    ours["tpot_ms"]["p99"] = 40.1
    assert aims()[aim][:2] == ["TTFT p99 500 ms, TPOT p99 40.1 ms", "**missed**"]
    (in_time,) = [
        name for name in aims() if name.startswith("the grid, where serving alone is in time: in time at all")
    ]
    before = int(aims()[in_time][0])
    ours["attainment"] = 0.98
    assert aims()[in_time][:2] == [str(before - 1), "**missed**"]
    again = json.loads((tmp_path / "colocate_again_h200.json").read_text())
    late = [
        cell
        for cell in again["cells"]
        if cell["policy"] == "adaptive" and cell["attainment"] < 0.99 and cell["slo"]["tpot_ms"] > 10
    ]
    (in_time,) = [name for name in aims() if name.startswith("[the same again]") and "in time at all 19 places" in name]
    measured, verdict, why = aims()[in_time]
    assert (measured, verdict) == (str(19 - len(late)), "**missed**")
    assert "code x 2 at 15 ms (`adaptive` 95.0% in time, `harli` 96.0% in time" in why
    (by,) = [name for name in aims() if name.startswith("[the same again]") and "1.15 times" in name]
    before = float(aims()[by][0].partition(",")[0])
    for cell in late:
        cell["attainment"] = 0.99
    again["comparison"] = compare(again, 0.99)
    (tmp_path / "colocate_again_h200.json").write_text(json.dumps(again))
    assert aims()[in_time] == ["19", "met", ""]
    assert float(aims()[by][0].partition(",")[0]) > before, "one of the two places has all policies"
    half = json.loads((tmp_path / "colocate_half_h200.json").read_text())
    name = "[these places by later versions](#on-a-gpu-half-of-the-grid-by-a-later-version), on three hosts"
    in_time = f"{name}: in time at all 24 places"
    assert aims()[in_time] == ["24", "met", ""]
    assert aims()[f"{name}: on average 1.38 times `chunked`"][1] == "met"
    assert aims()[f"{name}: on average 1.75 times `static`"][0].endswith(", of 15 places"), "which have it"
    (one,) = [cell for cell in half["cells"] if (cell["policy"], _place_of(cell)) == ("adaptive", ("conv", 1.0, 40.0))]
    one["attainment"] = 0.98
    (tmp_path / "colocate_half_h200.json").write_text(json.dumps(half))
    assert aims()[in_time][:2] == ["23", "**missed**"]

    between = json.loads((tmp_path / "colocate_between_h200.json").read_text())
    names = [name for name in aims() if "[beside training between requests]" in name and "on one more host: " in name]
    (in_time,) = [name for name in names if name.endswith("in time at all 24 places")]
    (two_gpus,) = [name for name in names if "two GPUs" in name]
    assert aims()[in_time] == ["24", "met", ""]
    assert aims()[two_gpus][:2] == ["1.495", "**missed**"]
    for cell in between["cells"]:
        if cell["policy"] == "adaptive":
            cell["harvest"] *= 1.01
    (one,) = [c for c in between["cells"] if (c["policy"], _place_of(c)) == ("adaptive", ("conv", 4.0, 40.0))]
    one["attainment"] = 0.98
    between["comparison"] = compare(between, 0.99)
    (tmp_path / "colocate_between_h200.json").write_text(json.dumps(between))
    assert aims()[in_time][:2] == ["23", "**missed**"]
    assert aims()[two_gpus][1] == "met"

    def of_errors(aim: str) -> list[str]:
        (found,) = [row for name, row in aims().items() if name.startswith("errors of") and name.endswith(f": {aim}")]
        return found

    aim = "p95 10% alone, in each cell"
    serving = [cell["prediction_error"]["alone"] for cell in grid["cells"] if cell["policy"] == "inference-only"]
    assert f"where nothing trains, in the grid, {len(serving)} of {len(serving)} cells of " in of_errors(aim)[0]
    serving[0]["p95"] = 0.2
    found = f"where nothing trains, in the grid, {len(serving) - 1} of {len(serving)} cells of "
    assert found in of_errors(aim)[0]
    assert of_errors(aim)[0].endswith(", 20.0% at most")
    predicted = json.loads((tmp_path / "colocate_predicted_h200.json").read_text())
    for cell in predicted["cells"]:
        cell["prediction_error"]["alone"]["p95"] = 0.1
    predicted["cells"][0]["prediction_error"]["alone"]["p95"] = 0.11
    (tmp_path / "colocate_predicted_h200.json").write_text(json.dumps(predicted))
    measured, _, why = of_errors(aim)
    assert measured.startswith("22 of 23 cells of 19 batches or more, 11.0% at most")
    of_runs = ((again, "10 of 19 cells of 21"), (half, "17 of 24 cells of 21"), (between, "20 of 24 cells of 19"))
    for run, num in of_runs:
        ours = [cell for cell in run["cells"] if cell["policy"] == "adaptive"]
        worst = max(cell["prediction_error"]["alone"]["p95"] for cell in ours)
        assert f"; {num} batches or more, {worst:.1%} at most; " in measured
    assert (
        " 194 are more than 10% off, 29 of them decode steps, where it was 78 of 123 in the grid again, whose " in why
    )
    assert " Of the 165 with prompts 85 have a chunk behind earlier ones of the same prompt and took longer" in why
    measured, verdict, why = of_errors("p95 10% with training, in each cell")
    assert (measured.endswith(", 10.5%, 8.2% at most"), verdict) == (True, "**missed**")
    assert (
        "Above it: conv x 4 at 40 ms, where 6.1% of the 164 batches with training are. Of its 10 worst 10 took" in why
    )
    measured, verdict, _ = of_errors("mean 3% alone")
    assert ", 3.1% (in cells up to 6.1%), 3.0% (in cells up to 6.3%), 3.1% (in cells up to 5.8%); " in measured
    assert verdict == "**missed**", "by one of them"
    aim = "p95 10%, of all batches (read so later): at most 5% above"
    later = ("half", "rest", "code_half")
    runs = (
        (("predicted",), ("conv", 4.0, 10.0)),
        (("again",), None),
        (later, ("code", 2.0, 10.0)),
        (("between",), None),
    )
    for index, (kinds, left_out) in enumerate(runs):  # one is enough for a target to be missed
        paths = [tmp_path / f"colocate_{kind}_h200.json" for kind in kinds]
        before = [path.read_text() for path in paths]
        for share, verdict in ((0.05, "met"), (0.051, "**missed**")):
            for path, text in zip(paths, before, strict=True):
                run = json.loads(text)
                for cell in (each for each in run["cells"] if each["policy"] == "adaptive"):
                    is_counted = _place_of(cell) != left_out
                    cell["prediction_error"]["alone"]["share_above_10_percent"] = share if is_counted else 1.0
                path.write_text(json.dumps(run))
            measured, found, _ = of_errors(aim)
            assert (measured.split(",")[index].split()[0], found) == (f"{share:.1%}", verdict)
        for path, text in zip(paths, before, strict=True):
            path.write_text(text)
    steady = json.loads((tmp_path / "colocate_steady_h200.json").read_text())
    ours = [
        cell
        for run in steady[-3:]
        for cell in run["cells"]
        if (cell["policy"], cell["slo"]["tpot_ms"]) == ("adaptive", 40)
    ]
    aim = "32 sequences of about 1,024 tokens, TPOT 40 ms: harvest 88%"
    for harvests, attainments, verdict in (
        ((0.889, 0.89, 0.88), (1.0, 1.0, 1.0), "met"),
        ((0.889, 0.89, 0.879), (1.0, 1.0, 1.0), "**missed**"),
        ((0.879, 0.889, 0.89), (1.0, 1.0, 1.0), "**missed**"),
        ((0.889, 0.889, 0.89), (0.0, 1.0, 1.0), "**missed**"),
        ((0.889, 0.889, 0.89), (1.0, 1.0, 0.0), "**missed**"),
    ):
        for cell, harvest, attainment in zip(ours, harvests, attainments, strict=True):
            cell |= {"harvest": harvest, "tpot_ms": {**cell["tpot_ms"], "mean": 39.0}, "attainment": attainment}
        (tmp_path / "colocate_steady_h200.json").write_text(json.dumps(steady))
        measured = "; ".join(f"{harvest:.1%}, TPOT 39.0 ms" for harvest in harvests)
        assert aims()[aim][:2] == [measured, verdict]

    whole, parts = "a plan where 64 prompts wait, with their chunk's size and turns, by records", "p50   20.00 us"
    (tmp_path / "planner_slow_h200.txt").write_text(
        f"AdaptivePolicy, records  {parts}, p99\nprompt_budget, records  {parts}\ntake_turns, records  {parts}\n"
    )
    assert aims()[f"the cost of {whole}: 50 µs"][:2] == ["60.0 µs", "**missed**"], "the sum of its parts"
    newest = "AdaptivePolicy, records p50 49.90 us, p99 60.00 us, rounds 41.06 to 55.00 us  plans\n"
    newest += "AdaptivePolicy, records, all of it for 64 prompts p50 50.10 us, p99 70.00 us, rounds 44.00 to 56.00 us\n"
    (tmp_path / "planner_rounds_h200.txt").write_text(newest)
    measured = "49.9 µs, 41.1 to 55.0 in rounds; earlier versions on other hosts 20.0"
    assert aims()["the cost of a plan, by records: 50 µs"] == [measured, "met", ""]
    assert aims()[f"the cost of {whole}: 50 µs"][1] == "**missed**", "the newest version's figure counts"
    for seconds, verdict in ((180, "met"), (181, "**missed**")):
        (tmp_path / "profile_h200.txt").write_text(f"a line\n470 latencies in {seconds} s: a/file.json\n")
        assert aims()["`cotenant profile`: 180 s"][:2] == [f"{seconds} s, an earlier version", verdict]
