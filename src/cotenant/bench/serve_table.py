"""A run's figures for people, in the layout of `vllm bench serve`."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from cotenant.bench.figures import LATENCIES, MAX_LAG_P99_MS, PERCENTILES

_WIDTH = 50
_HEADERS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def print_run(run: dict[str, Any], console: Console) -> None:
    """Print a run, and a warning where its figures are the generator's or the load was not what was asked for."""
    for line in _lines(run):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for line in _warnings(run):
        console.print(f"warning: {line}", style="yellow", highlight=False, markup=False, soft_wrap=True)


def _lines(run: dict[str, Any]) -> list[str]:
    lines = [_header(" Serving Benchmark Result ", "=")]
    lines += [_row(title, run.get(key)) for title, key in _ROWS if key in run]
    if run["request_goodput"] is not None:
        lines += [
            _row("Request goodput (req/s):", run["request_goodput"]),
            _row("SLO attainment (%):", _times(run["slo_attainment"], 100)),
            _row("SLO target, TTFT (ms):", run["slo"]["ttft_ms"]),
            _row("SLO target, TPOT (ms):", run["slo"]["tpot_ms"]),
        ]
    for name in LATENCIES:
        lines.append(_header(_HEADERS[name], "-"))
        keys = [("Mean", f"mean_{name}_ms"), ("Median", f"median_{name}_ms")]
        keys += [(f"P{p}", f"p{p}_{name}_ms") for p in PERCENTILES if p != 50]
        lines += [_row(f"{title} {name.upper()} (ms):", run[key]) for title, key in keys]
    lag = run["generator"]["lag_ms"]
    lines.append(_header("Load Generator", "-"))
    lines += [_row(f"{title} lag, sent - due (ms):", lag[key]) for title, key in (("P50", "p50"), ("P99", "p99"))]
    lines += [
        _row("Max lag, sent - due (ms):", lag["max"]),
        _row("CPU of its busiest process (%):", _times(run["generator"]["cpu_share_of_busiest"], 100)),
    ]
    if run["failures"]:
        lines.append(_header("Failures", "-"))
        lines += [_row(f"{kind}:", count) for kind, count in run["failures"].items()]
        lines += [
            f"  {text}{f' ({count} times)' if count > 1 else ''}" for text, count in run["failure_examples"].items()
        ]
    return [*lines, "=" * _WIDTH]


_ROWS = (
    ("Successful requests:", "completed"),
    ("Failed requests:", "failed"),
    ("Unfinished requests:", "unfinished"),
    ("Request rate configured (RPS):", "request_rate"),
    ("Time scale of the trace:", "time_scale"),
    ("Offered request rate (req/s):", "offered_request_rate"),
    ("Benchmark duration (s):", "duration"),
    ("Total input tokens:", "total_input_tokens"),
    ("Total generated tokens:", "total_output_tokens"),
    ("Request throughput (req/s):", "request_throughput"),
    ("Output token throughput (tok/s):", "output_throughput"),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
    ("Peak concurrent requests:", "max_concurrent_requests"),
    ("Total token throughput (tok/s):", "total_token_throughput"),
)


def _warnings(run: dict[str, Any]) -> list[str]:
    warnings = []
    lag_p99 = run["generator"]["lag_ms"]["p99"]
    if lag_p99 is not None and lag_p99 > MAX_LAG_P99_MS:
        warnings.append(
            f"the generator was {lag_p99:.1f} ms late at p99: these figures are the generator's, not the server's; "
            "use more --processes, or a machine with free cores"
        )
    if run["short_answers"]:
        warnings.append(f"{run['short_answers']} answers were shorter than asked for: is ignore_eos not supported?")
    if run["interrupted"]:
        warnings.append("ended early: the figures are of what had been answered by then")
    return warnings


def _header(text: str, fill: str) -> str:
    return f"{text:{fill}^{_WIDTH}}"


def _row(title: str, value: float | str | None) -> str:
    shown = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{title:<40} {shown:<9}"


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
