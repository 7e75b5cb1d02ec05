"""Results of co-location become the first page's tables and comparison."""

from __future__ import annotations

import json
from pathlib import Path

from bench.rendering import colocate_cell, colocated, device_time, render


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
    (results / "colocate_half_h200.json").write_text(json.dumps(colocated(cells[:5])))
    (results / "colocate_rest_h200.json").write_text(json.dumps(colocated(cells[5:6])))
    (results / "colocate_code_half_h200.json").write_text(json.dumps(colocated(cells[6:])))
    newest = [{**cells[1], "harvest": 0.66}, {**cells[1], "slo": cells[4]["slo"], "attainment": 0.9}]
    (results / "colocate_newest_h200.json").write_text(json.dumps(colocated(newest)))
    (results / "colocate_a_gpu's.json").write_text(json.dumps(colocated(cells)))
    assert render("--results", str(results), "--target", str(target)).returncode == 0
    short, _, rest = target.read_text().partition("## Contents")
    rows = [line for line in short.splitlines() if line.startswith("| conv")]
    latencies = "5.0 / - | 5.0 / - | 5.0 / 9.2 | 5.0 / 9.2"
    load, late, best = "| conv x 1, 5.3 requests/s", "40.0%, too late | - | 65.0%, too late", "`chunked` 60.0%"
    assert rows == [
        f"{load} | 10 | 100.0% of 90 | 95.0% of 90 | {latencies} | {late} |",
        f"{load} | 40 | 100.0% of 90 | 100.0% of 90 | {latencies} | **65.0%** | {best} | **66.0%** |",
    ]
    assert "- [Colocate a gpu's](#colocate-a-gpus)" in rest
    assert "## Colocate a gpu's" in rest


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
