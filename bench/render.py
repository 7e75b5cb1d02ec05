"""Render bench/results/ into docs/benchmarks.md.

python bench/render.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
TARGET = ROOT / "docs" / "benchmarks.md"


def main() -> None:
    parts = [
        "# Benchmarks",
        "Rendered by `python bench/render.py` from `bench/results/`. Absolute times belong to the machine named beside "
        "them; compare within a table, not between machines.",
        _policies("Policies side by side", json.loads((RESULTS / "policies_cpu.json").read_text())),
        _policies(
            "The same, with four times the traffic", json.loads((RESULTS / "policies_busy_cpu.json").read_text())
        ),
        _text(
            "What being suspendable costs",
            "suspend_overhead_cpu.txt",
            "python bench/suspend_overhead.py",
            "Training steps cut after every layer against one whole forward and backward, in turn.",
        ),
        _text(
            "On a GPU",
            "gpu_tests_h200.txt",
            "make test-gpu",
            "Right before fast: the shapes of Llama-3.1-8B with random weights serve, train and end with an adapter; a "
            "small model gives the CPU's tokens and losses. Speed is not claimed yet.",
        ),
    ]
    TARGET.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _policies(title: str, result: dict[str, Any]) -> str:
    first = result["reports"][0]
    machine = first["machine"]
    rows = [
        f"## {title}",
        f"`{result['command']}`: the demo under each policy, on {machine['cpu']}, {machine['num_cores']} cores, torch "
        f"{machine['torch']}. {result['request_rate']:g} chat requests a second to the built-in model as a Poisson "
        "process, a LoRA job beside them. "
        "Targets are four times the medians without the job, measured in the same run; harvest is training speed as a "
        "share of training alone. On one lane of work, a CPU, that is what the requests leave: `temporal` waits for "
        "gaps between requests, `multitask` uses the slack inside them as well.",
        "| policy | TTFT p50 / p99 alone, ms | with the job | target "
        "| TPOT p50 / p99 alone, ms | with the job | target | SLO attainment | harvest |\n"
        f"|{'---|' * 9}\n" + "\n".join(_policy_row(report) for report in result["reports"]),
    ]
    return "\n\n".join(rows)


def _policy_row(report: dict[str, Any]) -> str:
    alone, corun = report["online"]["alone"], report["online"]["corun"]

    def pair(figures: dict[str, Any], key: str) -> str:
        return f"{figures[key]['p50']:.1f} / {figures[key]['p99']:.1f}"

    cells = [
        f"`{report['policy']}`",
        pair(alone, "ttft_ms"),
        pair(corun, "ttft_ms"),
        f"{corun['targets']['ttft_ms']:.0f}",
        pair(alone, "tpot_ms"),
        pair(corun, "tpot_ms"),
        f"{corun['targets']['tpot_ms']:.1f}",
        f"{corun['slo_attainment']:.1%} of {corun['num_requests']}",
        f"{report['finetune']['harvest']:.0%}",
    ]
    return f"| {' | '.join(cells)} |"


def _text(title: str, name: str, command: str, note: str) -> str:
    return f"## {title}\n\n`{command}`. {note}\n\n```\n{(RESULTS / name).read_text().strip()}\n```"


if __name__ == "__main__":
    main()
