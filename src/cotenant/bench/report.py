"""``report.json`` and ``report.html`` of a demo run."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cotenant.bench.charts import Marker, Series, cumulative, line_chart
from cotenant.bench.page import page, table
from cotenant.bench.summary import RequestResult, Targets


def write_json(path: Path, report: dict[str, Any]) -> None:
    """The report as JSON, indented for people."""
    path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_html(
    path: Path,
    report: dict[str, Any],
    alone: Sequence[RequestResult],
    corun: Sequence[RequestResult],
    loss: Sequence[tuple[int, float]],
) -> None:
    """The report as one self-contained page: the table, distributions, the requests over time, the loss curve."""
    targets = Targets(**report["online"]["corun"]["targets"])
    charts = [
        _distribution("Time to first token", "ms", alone, corun, "ttft_ms", targets.ttft_ms),
        _distribution("Time per output token", "ms", alone, corun, "tpot_ms", targets.tpot_ms),
        _timeline("TTFT over time, with the job", corun, "ttft_ms"),
        line_chart("Training loss", "step", "loss", [Series("training loss", [(float(s), v) for s, v in loss])]),
    ]
    answers = report["answers"]
    body = f"""<h1>One model, two tenants</h1>
<p class="sub">Chat traffic and a fine-tuning job on the same weights. Every figure was measured in this run, on
{html.escape(report["machine"]["cpu"])} ({report["machine"]["num_cores"]} cores), policy
{html.escape(report["policy"])}. Targets: four times the medians without the job.</p>
{table(("", "requests alone", "with the job"), table_rows(report))}
<h2>Latency and loss</h2><div class="charts">{"".join(charts)}</div>
<h2>Before and after</h2><p>{html.escape(answers["question"])}</p>
<blockquote>base: {html.escape(answers["base"])}</blockquote>
<blockquote>tuned: {html.escape(answers["tuned"])}</blockquote>"""
    path.write_text(page("cotenant: one run", body), encoding="utf-8")


def table_rows(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The short table: (what, alone, with the job)."""
    alone, corun, job = report["online"]["alone"], report["online"]["corun"], report["finetune"]

    def pair(name: str, key: str) -> tuple[str, str, str]:
        return (
            f"{name} p50 / p99, ms",
            f"{alone[key]['p50']:.1f} / {alone[key]['p99']:.1f}",
            f"{corun[key]['p50']:.1f} / {corun[key]['p99']:.1f}",
        )

    targets = corun["targets"]
    return [
        ("requests", str(alone["num_requests"]), str(corun["num_requests"])),
        pair(f"TTFT (target {targets['ttft_ms']:.0f} ms)", "ttft_ms"),
        pair(f"TPOT (target {targets['tpot_ms']:.1f} ms)", "tpot_ms"),
        ("SLO attainment", f"{alone['slo_attainment']:.1%}", f"{corun['slo_attainment']:.1%}"),
        (
            "training, tokens/s (alone: no requests)",
            f"{job['alone_tokens_per_s']:.0f}",
            f"{job['corun_tokens_per_s']:.0f} ({job['harvest']:.0%} of alone)",
        ),
        ("training loss, first → last", "", f"{job['loss'][0]:.3f} → {job['loss'][-1]:.3f}" if job["loss"] else "none"),
    ]


def _distribution(
    title: str, unit: str, alone: Sequence[RequestResult], corun: Sequence[RequestResult], field: str, target: float
) -> str:
    def line(name: str, results: Sequence[RequestResult]) -> Series:
        return Series(name, cumulative([getattr(result, field) for result in results if result.error is None]))

    series = [line("alone", alone), line("with the job", corun)]
    return line_chart(title, unit, "% of requests", series, [Marker(target, "target")])


def _timeline(title: str, results: Sequence[RequestResult], field: str) -> str:
    ordered = sorted((result for result in results if result.error is None), key=lambda result: result.sent_s)
    points = [(result.sent_s, float(getattr(result, field))) for result in ordered]
    return line_chart(title, "seconds", "ms", [Series("TTFT", points)])
