"""``cotenant bench colocate``: a fine-tuning job beside a load of requests, policy by policy, in this process."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.bench.colocate_text import with_parts
from cotenant.bench.comparison import compare
from cotenant.cli.bench_finetune import SEQ_LEN_DEFAULT, choose_rows
from cotenant.cli.colocate_figures import MIN_VALUES_FOR_P99
from cotenant.cli.colocate_flags import (
    ON_CPU,
    ON_CUDA,
    default,
    measured_target,
    policies_of,
    positive,
    sizes_of,
    targets_in,
    targets_of,
    usual_on,
)
from cotenant.cli.colocate_grid import Grid
from cotenant.cli.colocate_loads import (
    CONTEXT,
    NUM_TOKENS,
    SteadyPlan,
    TracePlan,
    learn,
    plan_steady,
    plan_trace,
    read_traces,
    trace_digest,
)
from cotenant.cli.colocate_notes import notes_on, warn, who_trains_little
from cotenant.cli.colocate_output import tell
from cotenant.cli.colocate_parts import KIND, check_continues, go_on_with, read_report
from cotenant.cli.interruption import INTERRUPTED_EXIT_CODE, sigterm_as_interrupt
from cotenant.cli.options import MOST_ALONE_S, model_to_measure
from cotenant.cli.output import (
    check_apart,
    check_outputs,
    counted,
    fail,
    say_phase,
)
from cotenant.config import (
    COMPRESS_WEIGHTS,
    LEAST_MODEL_LEN,
    MAX_LORA_RANK,
    BatchConfig,
    CoExecutionConfig,
    LoraConfig,
    ModelConfig,
    ServerConfig,
    require_target,
)
from cotenant.core.errors import InvalidInputError
from cotenant.core.output_file import check_trace_file, make_way
from cotenant.core.plan import Slo
from cotenant.scheduler.space import sm_shares

if TYPE_CHECKING:
    from cotenant.runtime.colocate_bench import ColocateBench

_TTFT_SLO_MS = 500.0
_TIME_SCALE = "1"


@sigterm_as_interrupt()
def colocate(
    model: Annotated[str, typer.Argument(help="As for `cotenant serve`.")],
    policies: Annotated[
        str | None,
        typer.Option(
            help=f"What `--policy` of `cotenant serve` takes, one row each. {default('policies')}", show_default=False
        ),
    ] = None,
    slo_tpot_ms: Annotated[
        str | None,
        typer.Option(
            help=f"Targets, one row each. Default: {ON_CUDA.slo_tpot_ms}; on a CPU four times what a step of a few "
            "sequences takes alone, measured at the start as `cotenant serve` does.",
            show_default=False,
        ),
    ] = None,
    slo_ttft_ms: Annotated[float, typer.Option(help="Of requests of a trace.")] = _TTFT_SLO_MS,
    slo_itl_ms: Annotated[
        float | None,
        typer.Option(
            help="Longest gap between two tokens that training may plan for. Default: three TPOT targets.",
            show_default=False,
        ),
    ] = None,
    slo_attainment: Annotated[
        float, typer.Option(min=0.001, max=0.9999, help="Share of requests that must meet both for the SLO to be met.")
    ] = 0.99,
    batch_sizes: Annotated[
        str | None,
        typer.Option(
            help=f"Steady decoding of so many sequences, one row each; '' for none. {default('batch_sizes')}",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=2,
            help=f"Tokens of each of them, about. Default: {CONTEXT}, or what the model takes if that is less.",
            show_default=False,
        ),
    ] = None,
    num_tokens: Annotated[
        int | None,
        typer.Option(
            min=8,
            help=f"Tokens of each of them that are timed. Default: {NUM_TOKENS}, or what the model takes if that is "
            "less.",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            help="Requests of a trace, as for `cotenant bench serve`; several when given again.", show_default=False
        ),
    ] = None,
    window: Annotated[
        str | None, typer.Option(metavar="START:END", help="Only these seconds of it.", show_default=False)
    ] = None,
    busiest: Annotated[
        float | None, typer.Option(min=1.0, help="Its busiest so many seconds alone.", show_default=False)
    ] = None,
    min_requests: Annotated[
        int, typer.Option(min=1, help="A trace with fewer is run through again: p99 is not stated of fewer than 100.")
    ] = MIN_VALUES_FOR_P99,
    time_scale: Annotated[
        str, typer.Option(help="How many times as fast as it was recorded, one row each.")
    ] = _TIME_SCALE,
    cell_seconds: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="Of a trace, what comes in so many seconds at each rate, or until --min-requests have come.",
            show_default=False,
        ),
    ] = None,
    learning_seconds: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Of the first trace, what each policy serves before anything is measured, so that none has to predict "
            "from less than those after it.",
        ),
    ] = 8.0,
    rounds: Annotated[
        int,
        typer.Option(
            min=1,
            help="Measure each policy so many times at a place, in turn, back and forth: a cell is all of its runs.",
        ),
    ] = 1,
    skip_hopeless: Annotated[
        bool,
        typer.Option(help="Begin with inference-only, and measure nothing else where that misses the SLO already."),
    ] = False,
    seq_len: Annotated[
        int | None,
        typer.Option(
            min=2,
            help=f"Tokens of each training sequence. {SEQ_LEN_DEFAULT} On a CPU: {ON_CPU.seq_len}.",
            show_default=False,
        ),
    ] = None,
    tokens_per_step: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Of an optimizer step, a multiple of --seq-len. Default: the most up to "
            f"{ON_CUDA.tokens_per_step}, on a CPU up to {ON_CPU.tokens_per_step}.",
            show_default=False,
        ),
    ] = None,
    tasklet_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of a micro-batch, at least one sequence. 0: as the server chooses.")
    ] = 0,
    fuse: Annotated[
        bool | None,
        typer.Option(
            "--fuse/--no-fuse", help="Run forward tasklets inside batches. Default: on CUDA.", show_default=False
        ),
    ] = None,
    r: Annotated[
        int, typer.Option("--r", min=1, max=MAX_LORA_RANK, help="Rank of the LoRA adapter that is trained.")
    ] = 16,
    alone_seconds: Annotated[
        float, typer.Option(min=0.1, max=MOST_ALONE_S, help="How long training is timed by itself.")
    ] = 10.0,
    max_model_len: Annotated[
        int, typer.Option(min=0, help="Longer requests of a trace are left out. 0: as long as the load needs.")
    ] = 0,
    load_format: Annotated[str, typer.Option(help="dummy: random weights.")] = "auto",
    compress_weights: Annotated[str, typer.Option(help=", ".join(COMPRESS_WEIGHTS) + ".")] = "auto",
    dtype: Annotated[str, typer.Option()] = "auto",
    device: Annotated[str, typer.Option()] = "auto",
    label: Annotated[str, typer.Option(help="A name for these figures.")] = "cotenant",
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here.", show_default=False)
    ] = None,
    html_path: Annotated[
        Path | None, typer.Option("--html", help="Write a report with charts here.", show_default=False)
    ] = None,
    trace_file: Annotated[
        Path | None,
        typer.Option(
            help="Write a Chrome trace of all that is run here, as `cotenant serve` does.", show_default=False
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option(help="Go on where a run was cut off: what the file of --json has is not measured again.")
    ] = False,
) -> None:
    """Train a LoRA adapter on random tokens beside a load, through the loop of the server's worker: what requests wait
    and what training gets, for each policy, target and load, and how policies compare. Harvest is training's speed as a
    share of what it reaches with the device to itself, measured in the same run.
    """
    # What is wrong is said at once: the device, by which defaults differ, is known once torch is imported.
    names = None if policies is None else policies_of(policies, skip_hopeless=skip_hopeless)
    tpots_ms = None if slo_tpot_ms is None else targets_of(slo_tpot_ms)
    require_target(slo_ttft_ms, "slo-ttft-ms")
    require_target(slo_itl_ms, "slo-itl-ms")
    sizes = None if batch_sizes is None else sizes_of(batch_sizes)
    scales = list(dict.fromkeys(positive(part, "time-scale") for part in time_scale.split(","))) if trace else []
    chosen, limit = model_to_measure(model, load_format, dtype, device, compress_weights=compress_weights)
    if sizes == [] and not trace:
        raise InvalidInputError("--batch-sizes or --trace: which load is to be served?", param="batch-sizes")
    if not trace and (window, busiest, cell_seconds, time_scale) != (None, None, None, _TIME_SCALE):
        raise InvalidInputError(
            "--window, --busiest, --cell-seconds and --time-scale are of a trace: give --trace", param="trace"
        )
    if sizes == [] and (context, num_tokens) != (None, None):
        raise InvalidInputError(
            "--context and --num-tokens are of steady decoding: give --batch-sizes", param="batch-sizes"
        )
    check_outputs(json=json_path, html=html_path, **{"trace-file": trace_file})
    check_apart({"json": json_path, "html": html_path, "trace-file": trace_file}, trace or [])
    if trace_file is not None:
        check_trace_file(trace_file)
    if resume and json_path is None:
        raise InvalidInputError("--resume goes on with the file of --json: give it", param="resume")
    before = read_report(json_path) if resume and json_path is not None and json_path.exists() else None
    if resume and before is None:
        say_phase(f"--resume: {json_path} is not there yet, so all is measured")
    traces = read_traces(trace or [], busiest, max_model_len or limit, window)
    notes = notes_on(traces, max_model_len or limit)
    warn(notes)
    # Here and not above: torch takes seconds to import, and `cotenant --help` has no use for it.
    from cotenant.runtime.colocate_bench import ColocateBench
    from cotenant.runtime.finetune_workload import Workload

    usual = usual_on(device)
    names = policies_of(usual.policies, skip_hopeless=skip_hopeless) if names is None else names
    sizes = sizes_of(usual.batch_sizes) if sizes is None else sizes
    seq_len = min(usual.seq_len, limit) if seq_len is None and usual.seq_len is not None else seq_len
    seq_len, tokens_per_step = choose_rows(model, limit, seq_len, tokens_per_step, usual.tokens_per_step)
    plans: list[SteadyPlan | TracePlan] = [*plan_steady(sizes, context, num_tokens, max_model_len or limit)]
    plans += [
        plan_trace(name, traces[name], scale, min_requests, cell_seconds)
        for name, scale in itertools.product(traces, scales)
    ]
    lengths = (plan.wished if isinstance(plan, SteadyPlan) else plan.longest for plan in plans)
    longest = max(LEAST_MODEL_LEN, *lengths)
    chosen = replace(chosen, max_model_len=max_model_len or min(limit, longest))
    if before is not None and compress_weights == "auto":  # an earlier version may not have had it
        chosen = replace(chosen, compress_weights="on" if before["compressed"] else "off")
    config = _config(chosen, tasklet_tokens, names, trace_file, fuse=fuse)
    workload = Workload(seq_len, tokens_per_step, tasklet_tokens, r, gradient_checkpointing=False)
    settings = {
        "load_format": load_format, "slo_attainment": slo_attainment, "slo_itl_ms": slo_itl_ms, "fuse": fuse,
        "rounds": rounds, "max_model_len": max_model_len, "learning_seconds": learning_seconds,
        "traces": {path.stem: trace_digest(path) for path in trace or []},
    }  # fmt: skip
    if before is not None:  # what is known without the model, which takes a while to load
        known: dict[str, Any] = {"compressed": chosen.compress_weights == "on"}
        if chosen.dtype != "auto":
            known["dtype"] = chosen.dtype
        check_continues({"model": chosen.name, "training": asdict(workload), **known, **settings}, before)
    if tpots_ms is None:  # those to be measured are as in the run before, or nothing of it would be gone on with
        tpots_ms = targets_in(before) if usual.slo_tpot_ms is None else targets_of(usual.slo_tpot_ms)
    slos = [Slo(slo_ttft_ms, tpot_ms, slo_itl_ms, slo_attainment) for tpot_ms in tpots_ms]
    grid = Grid([plan.parameters for plan in plans], slos, names, skip_hopeless, rounds)
    report, was_interrupted = before, False
    if report is None or not slos or grid.missing(report):
        say_phase(f"loading {model}")
        with ColocateBench(config, workload) as bench:
            if not slos:
                tpot_ms = measured_target(bench.default_slo)
                say_phase(f"TPOT target: {tpot_ms:g} ms, four times what a step took; --slo-tpot-ms sets others")
                grid = replace(grid, slos=[Slo(slo_ttft_ms, tpot_ms, slo_itl_ms, slo_attainment)])
            settings = {**_report(bench, label), **settings, "notes": notes}
            report, was_interrupted = _measured(bench, plans, grid, settings, before, json_path, alone_seconds)
    if was_interrupted and not report["cells"]:
        fail("interrupted before anything was measured", exit_code=INTERRUPTED_EXIT_CODE)
    report["cells"] = with_parts(report["cells"])
    report["comparison"] = compare(report, slo_attainment)
    tell(report, json_path, html_path)
    if was_interrupted:
        how = (
            "--resume goes on with them" if json_path is not None else "with --json they are kept, and --resume goes on"
        )
        fail(f"interrupted: {counted(len(report['cells']), 'cell')} measured; {how}", exit_code=INTERRUPTED_EXIT_CODE)


def _measured(
    bench: ColocateBench,
    plans: Sequence[SteadyPlan | TracePlan],
    grid: Grid,
    settings: dict[str, Any],
    before: dict[str, Any] | None,
    json_path: Path | None,
    alone_seconds: float,
) -> tuple[dict[str, Any], bool]:
    """The report, which begins with ``settings`` and goes on with ``before``, and whether it was interrupted."""
    say_phase("waiting until all kernels are compiled")
    bench.wait_for_kernels()
    say_phase("timing training alone")
    alone = round(bench.alone(alone_seconds), 2)
    warn(little := who_trains_little(bench, grid))
    measured = {"train_alone_tokens_per_s": alone, "train_alone_utilisation": bench.alone_utilisation}
    report = {**settings, **measured, "notes": [*settings["notes"], *little], "cells": []}
    if before is not None:
        report = go_on_with(report, before)
    elif json_path is not None:
        make_way(json_path)
    try:
        learn(bench, plans, grid.missing(report), settings["learning_seconds"])
        # A seed for each load: what policies are compared under is the same.
        grid.measure(report, [plan.load(bench, seed) for seed, plan in enumerate(plans)], json_path)
    except KeyboardInterrupt:
        return report, True
    return report, False


def _config(
    model: ModelConfig,
    tasklet_tokens: int,
    policies: Sequence[str],
    trace_file: Path | None = None,
    *,
    fuse: bool | None,
) -> ServerConfig:
    shares = tuple(sorted({share for name in policies for share in sm_shares(name)}))
    return ServerConfig(
        model=model,
        batch=BatchConfig(max_queue=1_000_000),
        lora=LoraConfig(),
        coexecution=CoExecutionConfig(
            tasklet_tokens=tasklet_tokens or None, fuse=fuse, sm_shares=shares, policies=tuple(policies)
        ),
        trace_file=None if trace_file is None else str(trace_file),
    )


def _report(bench: ColocateBench, label: str) -> dict[str, Any]:
    from cotenant.bench.machine import command_line, machine, versions

    return {
        "kind": KIND,
        "label": label,
        **bench.description(),
        "machine": machine(),
        "versions": versions(),
        "command": command_line(["cotenant", *sys.argv[1:]]),
    }
