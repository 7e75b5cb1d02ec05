"""Render every result under bench/results/ into docs/benchmarks.md.

python bench/render.py

JSON files have a ``kind``, which names their renderer in RENDERERS; a file may hold a list of results of one kind, as
several servers side by side. Text files are shown as they are. Titles and notes are in SECTIONS, in the order of the
page; files that are not there come after, titled by their names.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
TARGET = ROOT / "docs" / "benchmarks.md"

INTRODUCTION = (
    "Rendered by `python bench/render.py` from `bench/results/`. Absolute times belong to the machine named beside "
    "them; compare within a table, not between machines."
)


@dataclass(frozen=True, slots=True)
class Section:
    """The heading of a results file. ``note`` stands below it; text files have their ``command`` here."""

    file: str
    title: str
    note: str = ""
    command: str = ""


SECTIONS = (
    Section("policies_cpu.json", "Policies side by side"),
    Section("policies_busy_cpu.json", "The same, with four times the traffic"),
    Section(
        "suspend_overhead_cpu.txt",
        "What being suspendable costs",
        "Training steps cut after every layer against the same micro-batches in one go, in turn.",
        "python bench/suspend_overhead.py",
    ),
    Section("convergence_cpu.json", "What disturbances do to what a job learns"),
    Section(
        "serve_conv_h200.json",
        "On a GPU: the conversation trace, beside vLLM",
        "The ten busiest minutes of Azure's conversation trace of 2023 (mean prompt 1,344 tokens, mean answer 143), at "
        "their own rate and faster, against the shapes of Llama-3.1-8B in bf16 with random weights. Each server ran "
        "twice on one host, each time on a GPU of its own and all four at the same time: `python "
        "bench/compare_servers.py --trace conv.csv --busiest 600 --sweep 1 --gpus 0,1` and the same with `--sweep "
        "2,2.25 --gpus 2,3 --port 8120`. A sweep ends for a server at the first rate that misses the targets; no rate "
        "between 1 and 2 was run.",
    ),
    Section("soak_cpu.json", "Half an hour of everything at once"),
    Section(
        "gpu_serving_h200.txt",
        "On a GPU: parts of the server",
        "What the tests print: growing and shrinking the KV cache; the sampler at a vocabulary of 128,256; a step's "
        "layers with LoRA adapters of rank 16; the device's wait between decode steps of an 8B model; and for small "
        "random models of each family the error of the chosen tokens' log-probabilities against transformers in "
        "float32, beside the error that transformers itself has in the same half precision. From before kernels began "
        "while the one before ends.",
        "python -m pytest tests/gpu -s",
    ),
    Section(
        "gpu_tests_h200.txt",
        "On a GPU: training beside serving",
        "The shapes of Llama-3.1-8B with random weights serve, train and end with an adapter; a small model gives the "
        "CPU's tokens and losses. From before decode steps were captured.",
        "make test-gpu",
    ),
)

Result = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--target", type=Path, default=TARGET)
    arguments = parser.parse_args()
    parts = ["# Benchmarks", INTRODUCTION]
    for section in sections(arguments.results):
        parts += [f"## {section.title}", *render(section, arguments.results / section.file)]
    arguments.target.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


def sections(results: Path) -> list[Section]:
    """The known files that are there, then the others by name."""
    there = {path.name for path in results.iterdir() if path.suffix in (".json", ".txt")}
    known = [section for section in SECTIONS if section.file in there]
    others = sorted(there - {section.file for section in SECTIONS})
    return known + [Section(name, _title_of(name)) for name in others]


def _title_of(name: str) -> str:
    words = name.rpartition(".")[0].replace("_", " ")
    return words[:1].upper() + words[1:]


def render(section: Section, path: Path) -> list[str]:
    """The paragraphs of one file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".txt":
        command = f"`{section.command}`. " if section.command else ""
        return [f"{command}{section.note}", f"```\n{text.strip()}\n```"]
    content = json.loads(text)
    results = content if isinstance(content, list) else [content]
    kinds = {result.get("kind", "policies") for result in results}
    if len(kinds) != 1 or not kinds <= set(RENDERERS):
        raise SystemExit(f"{path}: its kind must be one of {', '.join(RENDERERS)}, not {', '.join(sorted(kinds))}")
    return [section.note, *RENDERERS[kinds.pop()](results)]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" if line[0] != "---" else f"|{'---|' * len(line)}" for line in lines)


def machine_text(result: Result) -> str:
    """What a result was measured on, in words."""
    machine, versions = result["machine"], result.get("versions") or result["machine"]
    gpus = "".join(f", {gpu}" for gpu in machine.get("gpus", ()))
    torch = f", torch {versions['torch']}" if versions.get("torch") else ""
    return f"{machine['cpu']}, {machine['num_cores']} cores{gpus}{torch}"


def pair(low: float | None, high: float | None) -> str:
    """Two figures in one cell."""
    return " / ".join("-" if value is None else f"{value:.1f}" for value in (low, high))


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
        "gaps between requests, `multitask` uses the slack inside them as well.",
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
            cells = [_spread_text(row[key]), *(_spread_text(found[key]) if found else "-" for found in beside)]
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


def _spread_text(spread: Result) -> str:
    return f"{spread['p50']:.2f} ({spread['p10']:.2f} to {spread['p90']:.2f})"


# cotenant bench finetune, bench/compare_finetune.py


def finetune(results: Sequence[Result]) -> list[str]:
    """A row for each result, then the times of each one's tasklets, suspensions and discards. Of other libraries there
    are fewer figures. Where each variant ran at several sizes, its best is in bold."""
    first = results[0]
    text = (
        f"`{first['command']}`: {first['model']}, {first['dtype']}, on {machine_text(first)}. LoRA of rank "
        f"{first['r']} on all linear layers, sequences of {first['seq_len']:,} random tokens, "
        f"{first['tokens_per_step']:,} tokens a step.{_share_text(first)}"
    )
    header = ["", "micro-batch", "tokens/s", "share", "step, ms", "peak memory, GiB", "CPU of the launching thread"]
    times = ["", "", "p50", "p10", "p90", "p99", "max"]
    rows = [row for result in results for row in _finetune_times(result)]
    parts = [text, table(header, [_finetune_row(result) for result in results])]
    return [*parts, "Milliseconds:", table(times, rows)] if rows else parts


def _share_text(first: Result) -> str:
    if "ceilings" not in first:
        return ""
    return (
        f" The share is of {first['ceilings']['matmul_tflop_s']:.4g} TFLOP/s of a matrix product in the same run, at "
        f"{first['flop_per_token'] / 1e9:.3g} GFLOP a token: 4 for each parameter, the embedding's included, attention "
        f"and the adapter left out (in brackets: {first['flop_per_token_multiplied'] / 1e9:.3g}, without the "
        "embedding's, by which nothing is multiplied)."
    )


def _finetune_row(result: Result) -> list[str]:
    memory, cpu_share = result["memory"], result.get("cpu_share")
    peak = memory.get("peak_allocated_bytes", memory.get("peak_resident_bytes"))
    reserved = f", reserved {memory['peak_reserved_bytes'] / 2**30:.1f}" if "peak_reserved_bytes" in memory else ""
    speed = f"{result['tokens_per_s']['mean']:,.0f}"
    share = "share_of_matmul_rate"
    return [
        f"{result['label']}{', gradient checkpointing' if result['gradient_checkpointing'] else ''}",
        f"{result['micro_batch_tokens']:,}",
        f"**{speed}**" if result.get("best") else speed,
        f"{result[share]:.1%} ({result[f'{share}_multiplied']:.1%})" if share in result else "-",
        _spread_text(result["step_ms"]),
        f"{peak / 2**30:.1f}{reserved}",
        f"{cpu_share['launching_thread']:.1%}, launching {cpu_share['launching']:.1%}" if cpu_share else "-",
    ]


def _finetune_times(result: Result) -> list[list[str]]:
    spreads = {f"tasklet: {kind}": spread for kind, spread in result.get("tasklet_ms", {}).items()}
    spreads |= {name: result[name]["latency_ms"] for name in ("suspend", "discard") if name in result}
    shares = ("p50", "p10", "p90", "p99", "max")
    return [[result["label"], name, *(f"{spread[share]:.3f}" for share in shares)] for name, spread in spreads.items()]


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


# bench/convergence.py


def convergence(results: Sequence[Result]) -> list[str]:
    (result,) = results
    disturbances = ", ".join(f"{count} times {kind}" for kind, count in result["disturbances"].items())
    rows = [
        [
            name,
            " ".join(f"{loss:.3f}" for loss in result[name]["final_validation_losses"]),
            f"{result[name]['mean']:.3f}",
            f"{result[name]['standard_deviation']:.3f}",
        ]
        for name in ("undisturbed", "disturbed")
    ]
    return [
        f"`{result['command']}`: {result['steps']} steps for each seed, on {machine_text(result)}. Disturbed about "
        f"every {result['seconds_between_disturbances']:g} s, over all seeds: {disturbances}. The two runs of a seed "
        f"differ by at most {result['largest_paired_difference']:.4f}.",
        table(["", "final validation loss, one for each seed", "mean", "standard deviation"], rows),
    ]


RENDERERS: dict[str, Callable[[Sequence[Result]], list[str]]] = {
    "convergence": convergence,
    "engine": engine,
    "finetune": finetune,
    "policies": policies,
    "resize": resize,
    "serve": serve,
    "soak": soak,
}


if __name__ == "__main__":
    main()
