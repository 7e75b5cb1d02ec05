"""Results about serving: policies, load on servers, the engine by itself, soak tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from renderers.text import Result, machine_text, pair, spread_text, table

# bench/compare_policies.py


def policies(results: Sequence[Result]) -> list[str]:
    (result,) = results
    first = result["reports"][0]
    header = [
        "policy",
        "TTFT p50 / p99 alone, ms",
        "with the job",
        "target",
        "TPOT p50 / p99 alone, ms",
        "with the job",
        "target",
        "SLO attainment",
        "harvest",
    ]
    return [
        f"`{result['command']}`: the demo under each policy, on {machine_text(first)}. "
        f"{result['request_rate']:g} chat requests a second to the built-in model as a Poisson "
        "process, a LoRA job beside them. "
        "Targets are four times the medians without the job, measured in the same run; harvest is training speed as a "
        "share of training alone. On one lane of work, a CPU, that is what the requests leave: `temporal` waits for "
        "gaps between requests, `multitask` and `adaptive` use the slack inside them as well.",
        table(header, [_policy_row(report) for report in result["reports"]]),
    ]


def _policy_row(report: Result) -> list[str]:
    alone, corun = report["online"]["alone"], report["online"]["corun"]
    return [
        f"`{report['policy']}`",
        pair(alone["ttft_ms"]["p50"], alone["ttft_ms"]["p99"]),
        pair(corun["ttft_ms"]["p50"], corun["ttft_ms"]["p99"]),
        f"{corun['targets']['ttft_ms']:.0f}",
        pair(alone["tpot_ms"]["p50"], alone["tpot_ms"]["p99"]),
        pair(corun["tpot_ms"]["p50"], corun["tpot_ms"]["p99"]),
        f"{corun['targets']['tpot_ms']:.1f}",
        f"{corun['slo_attainment']:.1%} of {corun['num_requests']}",
        f"{report['finetune']['harvest']:.0%}",
    ]


# cotenant bench serve


def serve(results: Sequence[Result]) -> list[str]:
    """One row for each rate; with several servers, each figure has a column for each."""
    runs = [_serve_runs(result) for result in results]
    variable = next((name for name in ("time_scale", "request_rate") if name in runs[0][0]), "request_rate")
    names = [result.get("label") or result["model_id"] for result in results]
    rows: list[list[str]] = []
    # A server may have been measured at a rate more than once: each of its runs is shown.
    keys = [_numbered([run.get(variable) for run in of_server]) for of_server in runs]
    for key in sorted(set(chain.from_iterable(keys)), key=lambda key: (float(key[0]), key[1])):
        found = [of_server[own.index(key)] if key in own else None for of_server, own in zip(runs, keys, strict=True)]
        cells = [cell(run) if run else "-" for _, cell in _SERVE_COLUMNS for run in found]
        rows.append([_value_text(key[0], [run for run in found if run]), *cells])
    header = [title if len(names) == 1 else f"{title}: {name}" for title, _ in _SERVE_COLUMNS for name in names]
    return [
        *(_serve_text(name, result) for name, result in zip(names, results, strict=True)),
        table([_VARIABLES[variable], *header], rows),
    ]


_VARIABLES = {"time_scale": "trace speed", "request_rate": "requests/s"}
_SERVE_COLUMNS: Sequence[tuple[str, Callable[[Result], str]]] = (
    ("TTFT p50 / p99, ms", lambda run: pair(run["p50_ttft_ms"], run["p99_ttft_ms"])),
    ("TPOT p50 / p99, ms", lambda run: pair(run["p50_tpot_ms"], run["p99_tpot_ms"])),
    (
        "SLO attainment",
        lambda run: "-" if run["slo_attainment"] is None else f"{run['slo_attainment']:.1%} of {_num_judged(run)}",
    ),
    ("requests/s answered", lambda run: f"{run['request_throughput'] or 0:.2f}"),
    ("output tokens/s", lambda run: f"{run['output_throughput'] or 0:.0f}"),
)


def _value_text(value: float | str, runs: Sequence[Result]) -> str:
    """A rate, or a trace's speed and the rate that it comes to."""
    offered = runs[0].get("offered_request_rate") if "time_scale" in runs[0] else None
    return f"{float(value):g}" + (f" ({offered:.2f} requests/s)" if offered is not None else "")


def _serve_runs(result: Result) -> list[Result]:
    runs: list[Result] = result.get("runs", [result])
    return runs


def _num_judged(run: Result) -> int:
    return int(run["completed"]) + int(run["failed"])


def _numbered(values: Sequence[Any]) -> list[tuple[Any, int]]:
    """Each value with how often it has come before."""
    return [(value, values[:index].count(value)) for index, value in enumerate(values)]


def _serve_text(name: str, result: Result) -> str:
    slo = _serve_runs(result)[0]["slo"]
    targets = [f"{key.upper()} {slo[f'{key}_ms']:g} ms" for key in ("ttft", "tpot") if slo[f"{key}_ms"] is not None]
    wanted = f" Targets: {', '.join(targets)}." if targets else ""
    version = f" (version {result['server_version']})" if result.get("server_version") else ""
    held = ""
    if "highest_sustained" in result and targets:
        highest = result["highest_sustained"]
        what = _VARIABLES[result["swept"]]
        held = f" Highest {what} with p99 within targets: {'none' if highest is None else f'{highest:g}'}."
    return (
        f"{name}{version}: `{result['command']}`, {_load_text(result)}, the load generator on {machine_text(result)}."
        f"{wanted}{held}{_caveats(_serve_runs(result))}"
    )


def _caveats(runs: Sequence[Result]) -> str:
    """How late the generator was at worst, and what failed."""
    lags = [run["generator"]["lag_ms"]["p99"] for run in runs]
    late = max((lag for lag in lags if lag is not None), default=0.0)
    failures = Counter[str]()
    for run in runs:
        failures.update(run["failures"])
    failed = "".join(f" {count} failed: {kind}." for kind, count in failures.items())
    return f" The generator was at most {late:.1f} ms late at p99.{failed}"


def _load_text(result: Result) -> str:
    if "trace" not in result:
        return f"{result['random_input_len']} tokens in and {result['random_output_len']} out"
    window = result["trace_window_s"]
    part = f", seconds {float(window[0]):.0f} to {float(window[1]):.0f}" if window else ""
    return f"trace `{result['trace']}`{part}"


# bench/soak.py


def soak(results: Sequence[Result]) -> list[str]:
    parts = []
    for result in results:
        counts = ", ".join(f"{count} {kind}" for kind, count in result["requests"].items())
        outcome = "passed" if result["passed"] else "failed: " + "; ".join(result["problems"])
        samples = result["samples"]
        rows = [[f"{sample['at_s']:.0f}", *(cell(sample) for _, cell in _SOAK_COLUMNS)] for sample in samples]
        parts += [
            f"`{result['command']}`: {result['duration_s'] / 60:g} minutes at {result['concurrency']} requests at once "
            f"and {result['num_adapters']} adapters, on {machine_text(result)}. {counts}. **{outcome}**",
            table(["after, s", *(title for title, _ in _SOAK_COLUMNS)], rows),
        ]
    return parts


_SOAK_COLUMNS: Sequence[tuple[str, Callable[[Result], str]]] = (
    ("requests running", lambda sample: f"{sample.get('num_requests_running', 0):.0f}"),
    ("pages in use", lambda sample: f"{sample.get('kv_cache_usage_perc', 0):.1%}"),
    ("memory, MiB", lambda sample: f"{sample['rss_bytes'] / 2**20:.0f}" if "rss_bytes" in sample else "-"),
)

# cotenant bench engine, bench/compare_engines.py


def engine(results: Sequence[Result]) -> list[str]:
    """One row for each step and prompt; with another engine's figures beside ours, the ratio to the first of those."""
    first, others = results[0], results[1:]
    ceilings = first["ceilings"]
    text = (
        f"`{first['command']}`: {first['model']}, {first['dtype']}, on {machine_text(first)}. In the same run: "
        f"{ceilings['copy_gb_s']:.0f} GB/s of a copy, {ceilings['matmul_tflop_s']:.0f} TFLOP/s of a matrix product; "
        "the floor is what the bytes and the arithmetic of a step take at those. Medians, with the tenth and the "
        "ninetieth percentile."
    )
    names = [result["label"] for result in results]
    header = [
        "",
        *(f"{name}, ms" for name in names),
        *(f"{names[0]} / {name}" for name in names[1:]),
        "floor",
        "gap, µs",
    ]
    rows = []
    for part, key in (("decode", "step_ms"), ("prefill", "prefill_ms")):
        for row in first[part]:
            beside = [_same_row(other[part], row) for other in others]
            ratios = [f"{row[key]['p50'] / found[key]['p50']:.3f}" if found else "-" for found in beside]
            cells = [spread_text(row[key]), *(spread_text(found[key]) if found else "-" for found in beside)]
            gap = f"{row['gap_us']['p50']:.0f}" if row.get("gap_us") else "-"
            rows.append([_engine_row_name(row), *cells, *ratios, f"{row['floor_ms']:.2f}", gap])
    return [text, table(header, rows)]


def _engine_row_name(row: Result) -> str:
    if "num_tokens" in row:
        return f"prompt of {row['num_tokens']}"
    adapters = f", {row['num_adapters']} adapters" if row["num_adapters"] else ""
    return f"decode {row['batch_size']}, context {row['context']}{adapters}"


def _same_row(rows: Sequence[Result], wanted: Result) -> Result | None:
    keys = ("num_tokens", "batch_size", "context", "num_adapters")
    return next((row for row in rows if all(row.get(key) == wanted.get(key) for key in keys)), None)


# bench/resize_under_load.py


def resize(results: Sequence[Result]) -> list[str]:
    parts = []
    for result in results:
        outcome = "passed" if result["passed"] else "failed: " + "; ".join(result["problems"])
        parts += [
            f"`{result['command']}`: {result['model']}, batch {result['batch_size']}, context about "
            f"{result['context']}, on {machine_text(result)}. {result['num_resizes']} resizes moved "
            f"{result['resized_gib']:g} GiB in and out and {result['num_pages_moved']} pages in use; "
            f"{result['num_tokens']} tokens compared. **{outcome}**",
            table(
                ["step, ms", "p50", "p99", "max"],
                [
                    [name, *(f"{result[key][share]:.2f}" for share in ("p50", "p99", "max"))]
                    for name, key in (("undisturbed", "undisturbed_step_ms"), ("resizing", "resizing_step_ms"))
                ],
            ),
        ]
    return parts
