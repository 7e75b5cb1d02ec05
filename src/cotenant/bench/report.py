"""``report.json`` and ``report.html`` of a demo run."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cotenant.bench.charts import Marker, Series, cumulative, line_chart
from cotenant.bench.json_text import json_text
from cotenant.bench.page import page, table
from cotenant.bench.summary import RequestResult, Targets

_MOST_HARVEST = 1.05  # a little more may be the timing


def write_json(path: Path, report: dict[str, Any]) -> None:
    """The report as JSON, indented for people."""
    path.write_text(json_text(report, indent=2, ensure_ascii=False), encoding="utf-8")


def write_html(
    path: Path,
    report: dict[str, Any],
    alone: Sequence[RequestResult],
    corun: Sequence[RequestResult],
    loss: Sequence[tuple[int, float]],
    beside: Sequence[RequestResult] = (),
) -> None:
    """The report as one self-contained page: the table, distributions, the requests over time, the loss curve.
    ``beside``: the requests under the policy of the report's part ``beside``."""
    _, *names = table_header(report)
    phases = list(zip(names, (alone, corun, beside), strict=False))
    targets = Targets(**report["online"]["corun"]["targets"])
    charts = [
        _distribution("Time to first token", "ms", phases, "ttft_ms", targets.ttft_ms),
        _distribution("Time per output token", "ms", phases, "tpot_ms", targets.tpot_ms),
        _timeline(f"TTFT over time, {names[1]}", corun, "ttft_ms"),
        line_chart("Training loss", "step", "loss", [Series("training loss", [(float(s), v) for s, v in loss])]),
    ]
    answers = report["answers"]
    body = f"""<h1>One model, two tenants</h1>
<p class="sub">Chat traffic and a fine-tuning job on the same weights. Every figure was measured in this run, on
{html.escape(report["machine"]["cpu"])} ({report["machine"]["num_cores"]} cores), policy
{html.escape(report["policy"])}. Targets: four times the medians without the job.{_about_beside(report)}</p>
{table(table_header(report), table_rows(report))}
{f"<p>{text}</p>" if (text := caution(report)) else ""}
<h2>Latency and loss</h2><div class="charts">{"".join(charts)}</div>
<h2>Before and after</h2><p>{html.escape(answers["question"])}</p>
<blockquote>base: {html.escape(answers["base"])}</blockquote>
<blockquote>tuned: {html.escape(answers["tuned"])}</blockquote>"""
    path.write_text(page("cotenant: one run", body), encoding="utf-8")


def _about_beside(report: dict[str, Any]) -> str:
    if "beside" not in report:
        return ""
    return (
        " The last column: the same traffic for a shorter time and a job of the same kind, on a fresh server with the "
        f"same targets and policy {html.escape(report['beside']['policy'])}."
    )


def table_header(report: dict[str, Any]) -> list[str]:
    """The names of the short table's columns."""
    return ["", "requests alone", *(f"with the job, {part['policy']}" for part in _with_job(report))]


def table_rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """The short table: (what, alone, with the job), and with the job under another policy if the report has that."""
    alone, job, parts = report["online"]["alone"], report["finetune"], _with_job(report)
    phases = [alone, *(part["online"]["corun"] for part in parts)]
    targets, loss = report["online"]["corun"]["targets"], job["loss"]

    def latencies(name: str, key: str) -> tuple[str, ...]:
        spreads = [phase[key] for phase in phases]
        return f"{name} p50 / p99, ms", *(f"{_figure(one['p50'])} / {_figure(one['p99'])}" for one in spreads)

    def speed(part: dict[str, float]) -> str:
        return f"{part['corun_tokens_per_s']:.0f} ({part['harvest']:.0%} of alone)"

    rows = [
        ("requests", *(str(phase["num_requests"]) for phase in phases)),
        latencies(f"TTFT (target {targets['ttft_ms']:.0f} ms)", "ttft_ms"),
        latencies(f"TPOT (target {targets['tpot_ms']:.1f} ms)", "tpot_ms"),
        ("SLO attainment", *(_figure(phase["slo_attainment"], ".1%") for phase in phases)),
        (
            "training, tokens/s (alone: no requests)",
            f"{job['alone_tokens_per_s']:.0f}",
            *(speed(part["finetune"]) for part in parts),
        ),
        ("turns of the loop, with requests or without", "", *(_modes(part["iterations"]) for part in parts)),
        ("training loss, first → last", "", f"{loss[0]:.3f} → {loss[-1]:.3f}" if loss else "none"),
    ]
    return [(*row, *[""] * (2 + len(parts) - len(row))) for row in rows]


def caution(report: dict[str, Any]) -> str:
    """What to think of a share of training's speed alone that cannot be; empty where there is none."""
    if max(part["finetune"]["harvest"] for part in _with_job(report)) <= _MOST_HARVEST:
        return ""
    return (
        "Training cannot be faster beside requests than alone: the machine was busy with something else while it was "
        "timed alone. Run this again on one that is idle."
    )


def _figure(value: float, form: str = ".1f") -> str:
    """A dash where nothing was measured."""
    return "-" if math.isnan(value) else format(value, form)


def _modes(iterations: dict[str, int]) -> str:
    """How training shared them."""
    shared = [f"{count} {mode}" for mode, count in iterations.items() if mode != "none" and count]
    return ", ".join([*shared, f"{iterations.get('none', 0)} without training"])


def _with_job(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The measurements with the job: the report's own, then the other policy's, which has the same keys."""
    return [report, report["beside"]] if "beside" in report else [report]


def _distribution(
    title: str, unit: str, phases: Sequence[tuple[str, Sequence[RequestResult]]], field: str, target: float
) -> str:
    series = [
        Series(name, cumulative([value for result in results if (value := getattr(result, field)) > 0]))
        for name, results in ((name, [one for one in results if one.error is None]) for name, results in phases)
    ]
    # An answer of one token has no time per token after it. One policy may take ten times as long as another.
    return line_chart(title, unit, "% of requests", series, [Marker(target, "target")], log_x=True)


def _timeline(title: str, results: Sequence[RequestResult], field: str) -> str:
    ordered = sorted((result for result in results if result.error is None), key=lambda result: result.sent_s)
    points = [(result.sent_s, float(getattr(result, field))) for result in ordered]
    return line_chart(title, "seconds", "ms", [Series("TTFT", points)])
