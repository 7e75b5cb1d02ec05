"""The report of `cotenant bench colocate` as one page: what was measured, the comparison, the charts."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from cotenant.bench.board_power import NOTE as POWER_NOTE
from cotenant.bench.board_power import power_table
from cotenant.bench.colocate_charts import ColocateCharts
from cotenant.bench.colocate_text import HEADER, comparison_lines, place_name, table_row
from cotenant.bench.device_losses import HEADER as LOSS_HEADER
from cotenant.bench.device_losses import NOTE, loss_rows
from cotenant.bench.page import page, table

# Of what NVML says, by its names in a cell: the first two of time, the others of what there is.
_BUSY = {"sm": "GPU busy", "memory": "memory busy", "busy_sms": "SMs busy", "bandwidth": "bandwidth used"}
_MARKS = "A hollow mark, and a row in grey: the policy misses the SLO there."


def report_page(report: Mapping[str, Any]) -> str:
    """``report``: what ``--json`` has, with its comparison."""
    label = report["label"]
    return page(label if label == "cotenant" else f"cotenant: {label}", _body(report))


def _body(report: Mapping[str, Any]) -> str:
    comparison = report["comparison"]
    charts = ColocateCharts(report["cells"], comparison["slo_attainment"], report.get("num_sms"))
    parts = ["<h1>A fine-tuning job beside requests, policy by policy</h1>", *_setting(report)]
    parts += ["<h2>How the policies compare</h2>", *_comparison(comparison)]
    parts += [f"<p>{html.escape(note)}</p>" for note in report.get("notes", ())]
    parts += _section("Training throughput against the TPOT target", _MARKS, charts.against_target())
    parts += _section("Training throughput against the rate of requests", _MARKS, charts.against_rate())
    place, timelines = charts.timelines()
    about = f"{place}: who had the device over time, and how long steps took, tasklets beside or after them included."
    parts += _section("Timelines", about, timelines)
    parts += _losses(report["cells"])
    parts += _power(report)
    parts += _distributions(charts.distributions())
    parts += ["<h2>All cells</h2>", f'<p class="sub">Latencies in ms. {_MARKS}</p>', _cells(report)]
    return "\n".join(parts)


def _setting(report: Mapping[str, Any]) -> list[str]:
    machine, training = report["machine"], report["training"]
    gpus = "".join(f", {gpu}" for gpu in machine["gpus"])
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    settings = (
        f"{report['model']} in {report['dtype']} on {report['device']}; {machine['cpu']}, {machine['num_cores']} cores"
        f"{gpus}; {versions}."
    )
    runs = report.get("runs") or [report]
    alone = ", ".join(f"{run['train_alone_tokens_per_s']:,.0f}" for run in runs)
    job = (
        f"The job trains on sequences of {training['seq_len']:,} tokens, {training['tokens_per_step']:,} a step, rank "
        f"{training['r']}: {alone} tokens/s with the device to itself, measured in the same run"
        f"{' each' if len(runs) > 1 else ''}. Harvest is its speed beside requests as a share of that."
    )
    return [
        f'<p class="sub">{html.escape(settings)} {html.escape(job)}</p>',
        *(f"<p><code>{html.escape(command)}</code></p>" for command in dict.fromkeys(run["command"] for run in runs)),
        *_sharing(report.get("sharing", {})),
    ]


def _sharing(sharing: Mapping[str, Any]) -> list[str]:
    """Of a run that bench/compare_sharing.py has added to."""
    if "train_alone_tokens_per_s" not in sharing:
        return []
    training = sharing["training"]
    text = (
        f"In processes of their own, asked over HTTP: the server, and training by {sharing['peer']}, "
        f"{training['tokens_per_step']:,} tokens a step, {sharing['train_alone_tokens_per_s']:,.0f} tokens/s alone, of "
        "which harvest is a share there."
    )
    return [f'<p class="sub">{html.escape(text)}</p>', f"<p><code>{html.escape(sharing['command'])}</code></p>"]


def _comparison(comparison: Mapping[str, Any]) -> list[str]:
    averages: dict[str, float | None] = comparison["averages"]
    met = {name: [place["policies"][name] for place in comparison["places"] if name in place["policies"]]
           for name in averages}  # fmt: skip
    ordered = sorted(averages, key=lambda name: -(averages[name] or 0.0))
    rows = [
        [
            name,
            "-" if averages[name] is None else f"{averages[name]:,.0f}",
            f"{sum(figures['meets_slo'] for figures in met[name])} of {len(met[name])}",
        ]
        for name in ordered
    ]
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in comparison_lines(comparison))
    header = ("policy", "training, tokens/s, averaged over the grid (0 where the SLO is missed)", "places that meet it")
    return [table(header, rows), f"<ul>{lines}</ul>", *_best(comparison)]


def _best(comparison: Mapping[str, Any]) -> list[str]:
    """Place by place: harvest of each policy, the best other than ``adaptive``, and the ratio to it."""
    policies = list(comparison["averages"])
    rows = []
    for place in comparison["places"]:
        cells = [_harvest(place["policies"].get(name)) for name in policies]
        ratio = place["ratio_to_best_other"]
        rows.append(
            [place_name(place["place"]), *cells, place["best_other"] or "-", "-" if ratio is None else f"{ratio:.2f}"]
        )
    header = ("place", *policies, "best other", "adaptive to it")
    note = "Harvest of each policy at each place; in brackets where it misses the SLO."
    return [f'<p class="sub">{note}</p>', table(header, rows)]


def _harvest(figures: Mapping[str, Any] | None) -> str:
    if figures is None:
        return "-"
    return f"{figures['harvest']:.1%}" if figures["meets_slo"] else f"({figures['harvest']:.1%})"


def _section(title: str, note: str, charts: Sequence[str]) -> list[str]:
    if not charts:
        return []
    return [f"<h2>{title}</h2>", f'<p class="sub">{html.escape(note)}</p>', _grid(charts)]


def _losses(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [[place_name(cell), cell["policy"], *shares] for cell, shares in loss_rows(cells)]
    if not rows:
        return []
    return [
        "<h2>Where the device's time goes</h2>",
        f'<p class="sub">{html.escape(NOTE)}</p>',
        table(("place", "policy", *LOSS_HEADER), rows),
    ]


def _power(report: Mapping[str, Any]) -> list[str]:
    header, rows = power_table(report)
    if not rows:
        return []
    return [
        "<h2>What the board draws</h2>",
        f'<p class="sub">{html.escape(POWER_NOTE)}</p>',
        table(header, rows),
    ]


def _distributions(found: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    if not found:
        return []
    parts = ["<h2>Distributions of latency</h2>"]
    for index, (name, charts) in enumerate(found):
        state = ' open="open"' if index == 0 else ""
        parts.append(f"<details{state}><summary>{html.escape(name)}</summary>{_grid(charts)}</details>")
    return parts


def _grid(charts: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(charts)}</div>'


def _cells(report: Mapping[str, Any]) -> str:
    attainment = report["comparison"]["slo_attainment"]
    rows, classes = [], []
    busy = [cell.get("utilisation") or {} for cell in report["cells"]]
    told = [name for name in _BUSY if any(name in each for each in busy)]  # none of a CPU
    for cell, each in zip(report["cells"], busy, strict=True):
        rows.append([*table_row(cell), str(cell["num_requests"]), *(_percent(each, name) for name in told)])
        classes.append("" if cell["attainment"] is None or cell["attainment"] >= attainment else "missed")
    return table((*HEADER, "requests", *(_BUSY[name] for name in told)), rows, classes)


def _percent(busy: Mapping[str, float], name: str) -> str:
    return f"{busy[name]:.0%}" if name in busy else "-"
