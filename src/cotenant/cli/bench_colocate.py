"""``cotenant bench colocate``: a fine-tuning job beside a load of requests, policy by policy, in this process."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from cotenant.cli.bench_finetune import check_rows
from cotenant.cli.options import model_to_measure
from cotenant.cli.output import write_json
from cotenant.config import BatchConfig, CoExecutionConfig, LoraConfig, ServerConfig
from cotenant.core.errors import InvalidInputError
from cotenant.core.plan import Slo

if TYPE_CHECKING:
    from cotenant.bench.traces import Trace
    from cotenant.runtime.colocate_bench import Cell, ColocateBench

KIND = "colocate"
_Measure = Callable[[str, Slo], "Cell"]
_TTFT_SLO_MS = 500.0


def colocate(
    model: Annotated[str, typer.Argument(help="As for `cotenant serve`.")],
    policies: Annotated[str, typer.Option(help="What `--policy` of `cotenant serve` takes, one row each.")] = (
        "adaptive,multitask,temporal,whole-step,inference-only"
    ),
    slo_tpot_ms: Annotated[str, typer.Option(help="Targets, one row each.")] = "10,15,25,40",
    slo_ttft_ms: Annotated[float, typer.Option(min=0.001, help="Of requests of a trace.")] = _TTFT_SLO_MS,
    batch_sizes: Annotated[
        str, typer.Option(help="Steady decoding of so many sequences, one row each; '' for none.")
    ] = "32",
    context: Annotated[int, typer.Option(min=2, help="Tokens of each of them, about.")] = 1024,
    num_tokens: Annotated[int, typer.Option(min=8, help="Tokens of each of them that are timed.")] = 512,
    trace: Annotated[
        Path | None,
        typer.Option(help="Requests of a trace, as for `cotenant bench serve`, one row each.", show_default=False),
    ] = None,
    busiest: Annotated[
        float | None, typer.Option(min=1.0, help="Its busiest so many seconds alone.", show_default=False)
    ] = None,
    time_scale: Annotated[str, typer.Option(help="How many times as fast as it was recorded, one row each.")] = "1",
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens of each training sequence.")] = 2048,
    tokens_per_step: Annotated[int, typer.Option(min=2, help="Of an optimizer step, a multiple of --seq-len.")] = 4096,
    tasklet_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of a micro-batch, at least one sequence. 0: as the server chooses.")
    ] = 0,
    r: Annotated[int, typer.Option("--r", min=1, help="Rank of the LoRA adapter that is trained.")] = 16,
    alone_seconds: Annotated[float, typer.Option(min=0.1, help="How long training is timed by itself.")] = 10.0,
    max_model_len: Annotated[
        int, typer.Option(min=0, help="Longer requests of a trace are left out. 0: as long as the load needs.")
    ] = 0,
    load_format: Annotated[str, typer.Option(help="dummy: random weights.")] = "auto",
    dtype: Annotated[str, typer.Option()] = "auto",
    device: Annotated[str, typer.Option()] = "auto",
    label: Annotated[str, typer.Option(help="A name for these figures.")] = "cotenant",
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here.", show_default=False)
    ] = None,
) -> None:
    """Train a LoRA adapter on random tokens beside a load, through the loop of the server's worker: what requests wait
    and what training gets, for each policy, target and load. Harvest is training's speed as a share of what it reaches
    with the device to itself, measured in the same run.
    """
    names = [name.strip() for name in policies.split(",") if name.strip()]
    tpots_ms = [_positive(part, "slo-tpot-ms") for part in slo_tpot_ms.split(",")]
    sizes = [_whole(part, "batch-sizes") for part in batch_sizes.split(",") if part.strip()]
    scales = [_positive(part, "time-scale") for part in time_scale.split(",")] if trace is not None else []
    chosen, limit = model_to_measure(model, load_format, dtype, device)
    if not sizes and trace is None:
        raise InvalidInputError("--batch-sizes or --trace: which load is to be served?", param="batch-sizes")
    check_rows(model, limit, seq_len, tokens_per_step)
    for name in names:
        CoExecutionConfig(policy=name)  # that it exists
    requests = None if trace is None else _requests(trace, busiest, max_model_len or limit)
    # Here and not above: torch takes seconds to import, and `cotenant --help` has no use for it.
    from cotenant.runtime.colocate_bench import ColocateBench, steady_len
    from cotenant.runtime.finetune_workload import Workload

    longest = 0 if requests is None else max(each.input_len + each.output_len for each in requests.requests)
    longest = max([longest, *(steady_len(size, context, num_tokens) for size in sizes)])
    if longest > (max_model_len or limit):
        raise InvalidInputError(
            f"--context: {num_tokens} tokens of {max(sizes)} sequences around {context} take up to {longest}; the "
            f"model takes {max_model_len or limit}",
            param="context",
        )
    config = ServerConfig(
        model=replace(chosen, max_model_len=max_model_len or longest),
        batch=BatchConfig(max_queue=1_000_000),
        lora=LoraConfig(),
        coexecution=CoExecutionConfig(tasklet_tokens=tasklet_tokens or None),
    )
    workload = Workload(seq_len, tokens_per_step, tasklet_tokens, r, gradient_checkpointing=False)
    with ColocateBench(config, workload) as bench:
        alone = bench.alone(alone_seconds)
        slos = [Slo(slo_ttft_ms, tpot_ms) for tpot_ms in tpots_ms]
        loads = _loads(bench, sizes, context, num_tokens, requests, scales)
        report = {**_report(bench, label), "train_alone_tokens_per_s": round(alone, 2)}
        _measure_grid(report, loads, slos, names, json_path)


def _measure_grid(
    report: dict[str, Any],
    loads: Sequence[tuple[dict[str, Any], _Measure]],
    slos: Sequence[Slo],
    policies: Sequence[str],
    json_path: Path | None,
) -> None:
    """Measure each policy at each target under each load, and say so as it goes. The file is written after each cell:
    a long run that is cut off leaves what it has measured."""
    console = Console()
    alone = report["train_alone_tokens_per_s"]
    console.print(f"training alone: {alone:.0f} tokens/s")
    cells = report["cells"] = []
    for (load, measure), slo, policy in itertools.product(loads, slos, policies):
        cells.append(_figures(load, measure(policy, slo), alone))
        console.print(_line(cells[-1]), highlight=False, markup=False, soft_wrap=True)
        if json_path is not None:
            write_json(json_path, report)
    _print(report, console)


def _loads(
    bench: ColocateBench,
    sizes: Sequence[int],
    context: int,
    num_tokens: int,
    requests: Trace | None,
    scales: Sequence[float],
) -> list[tuple[dict[str, Any], _Measure]]:
    """Each load's name and parameters, and how to measure a policy under it."""
    from cotenant.runtime.load import Arrival

    def steady(size: int) -> tuple[dict[str, Any], _Measure]:
        load = {"load": "steady", "batch_size": size, "context": context, "num_tokens": num_tokens}
        return load, lambda policy, slo: bench.steady(policy, slo, size, context, num_tokens)

    def traced(chosen: Trace, scale: float) -> tuple[dict[str, Any], _Measure]:
        arrivals = [Arrival(each.at_s / scale, each.input_len, each.output_len) for each in chosen.requests]
        start_s, end_s = chosen.window_s or (0.0, chosen.requests[-1].at_s)
        duration_s = max((end_s - start_s) / scale, 1e-3)
        load = {"load": "trace", "format": chosen.format, "time_scale": scale, "window_s": chosen.window_s}
        return load, lambda policy, slo: bench.trace(policy, slo, arrivals, duration_s)

    loads = [steady(size) for size in sizes]
    return loads + [traced(requests, scale) for scale in scales] if requests is not None else loads


def _requests(path: Path, busiest_s: float | None, limit: int) -> Trace:
    """The trace's requests that fit ``limit`` tokens."""
    from cotenant.bench.traces import read_trace

    trace = read_trace(path)
    if busiest_s is not None:
        trace = trace.window(*trace.busiest(busiest_s))
    fitting = [each for each in trace.requests if each.input_len + each.output_len <= limit]
    if not fitting:
        raise InvalidInputError(f"--trace: no request of {path} fits {limit} tokens", param="trace")
    return replace(trace, requests=fitting, num_skipped=trace.num_skipped + len(trace.requests) - len(fitting))


def _figures(load: dict[str, Any], cell: Cell, alone: float) -> dict[str, Any]:
    from cotenant.bench.summary import distribution

    return {
        **load,
        "policy": cell.policy,
        "slo": {"ttft_ms": cell.slo.ttft_ms, "tpot_ms": cell.slo.tpot_ms},
        "duration_s": round(cell.duration_s, 3),
        "num_requests": cell.num_requests,
        "num_failed": cell.num_failed,
        "attainment": round(cell.num_attained / cell.num_requests, 4) if cell.num_requests else None,
        "ttft_ms": distribution(cell.ttft_ms) if cell.ttft_ms else None,
        "tpot_ms": distribution(cell.tpot_ms) if cell.tpot_ms else None,
        "itl_ms": distribution(cell.itl_ms) if cell.itl_ms else None,
        "output_tokens_per_s": round(cell.output_tokens_per_s, 2),
        "train_tokens_per_s": round(cell.train_tokens_per_s, 2),
        "harvest": round(cell.train_tokens_per_s / alone, 4),
        "iterations": cell.modes,
        "prediction_error": None if cell.prediction_error is None else round(cell.prediction_error, 4),
    }


def _report(bench: ColocateBench, label: str) -> dict[str, Any]:
    from cotenant.bench.machine import command_line, machine, versions

    return {
        "kind": KIND,
        "label": label,
        **bench.description(),
        "machine": machine(),
        "versions": versions(),
        "command": command_line(sys.argv),
    }


def _positive(text: str, flag: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InvalidInputError(f"--{flag}: expected numbers above 0, like 10,40, got {text.strip()!r}", param=flag)
    return value


def _whole(text: str, flag: str) -> int:
    value = _positive(text, flag)
    if not value.is_integer():
        raise InvalidInputError(f"--{flag}: expected whole numbers, got {text.strip()!r}", param=flag)
    return int(value)


def load_name(cell: dict[str, Any]) -> str:
    """A load in a few words."""
    if cell["load"] == "steady":
        return f"{cell['batch_size']} x {cell['context']}"
    return f"{cell['format']} x {cell['time_scale']:g}"


def _cells(cell: dict[str, Any]) -> list[str]:
    def pair(name: str) -> str:
        return "-" if cell[name] is None else f"{cell[name]['p50']:.1f}/{cell[name]['p99']:.1f}"

    attainment = "-" if cell["attainment"] is None else f"{cell['attainment']:.1%}"
    return [
        load_name(cell),
        f"{cell['slo']['tpot_ms']:g}",
        cell["policy"],
        f"{cell['harvest']:.1%}",
        attainment,
        pair("ttft_ms"),
        pair("tpot_ms"),
        pair("itl_ms"),
    ]


def _line(cell: dict[str, Any]) -> str:
    load, tpot_ms, policy, harvest, attainment, ttft, tpot, itl = _cells(cell)
    return (
        f"{load}, TPOT target {tpot_ms} ms, {policy}: harvest {harvest}, attainment {attainment}, TTFT {ttft}, "
        f"TPOT {tpot}, ITL {itl} ms"
    )


def _print(report: dict[str, Any], console: Console) -> None:
    table = Table("load", "TPOT target", "policy", "harvest", "attainment", "TTFT p50/p99", "TPOT", "ITL")
    for cell in report["cells"]:
        table.add_row(*_cells(cell))
    console.print(table)
