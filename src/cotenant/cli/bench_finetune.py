"""``cotenant bench finetune``: training by itself in this process, beside the device's matrix rate."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.cli.options import model_to_measure
from cotenant.cli.output import check_outputs, counted, say_phase, write_json
from cotenant.cli.tables import new_table, open_console
from cotenant.config import MAX_LORA_RANK
from cotenant.core.errors import InvalidInputError

if TYPE_CHECKING:
    from cotenant.runtime.finetune_bench import FinetuneBench

KIND = "finetune"
_REQUIRED_BYTES = 4 << 30
_SEQ_LEN, _TOKENS_PER_STEP = 2048, 16384  # where the model takes such sequences
_STEPS, _SAMPLES = 20, 200
# On a CPU, where a step takes seconds.
_CPU_TOKENS_PER_STEP, _CPU_STEPS, _CPU_SAMPLES = 2048, 5, 10
SEQ_LEN_DEFAULT = f"Default: {_SEQ_LEN}, or what the model takes if that is less."

_TokensPerStep = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Tokens of an optimizer step, a multiple of --seq-len. "
        f"Default: the most up to {_TOKENS_PER_STEP}, on a CPU up to {_CPU_TOKENS_PER_STEP}.",
        show_default=False,
    ),
]
_Steps = Annotated[
    int | None,
    typer.Option(
        "--steps",
        min=1,
        help=f"Optimizer steps that are timed. Default: {_STEPS}, on a CPU {_CPU_STEPS}.",
        show_default=False,
    ),
]
_Samples = Annotated[
    int | None,
    typer.Option(
        "--samples",
        min=1,
        help="Times that training is suspended, and that it is discarded. "
        f"Default: {_SAMPLES}, on a CPU {_CPU_SAMPLES}.",
        show_default=False,
    ),
]


def finetune(
    model: Annotated[str, typer.Argument(help="As for `cotenant serve`.")],
    seq_len: Annotated[
        int | None,
        typer.Option(min=2, help=f"Tokens of each training sequence, or row. {SEQ_LEN_DEFAULT}", show_default=False),
    ] = None,
    min_len: Annotated[
        int | None,
        typer.Option(
            min=2, help="Pack sequences of random lengths, from this to --seq-len, into rows.", show_default=False
        ),
    ] = None,
    tokens_per_step: _TokensPerStep = None,
    tasklet_tokens: Annotated[
        int,
        typer.Option(
            min=0, help="Tokens of a micro-batch; a longer sequence is one by itself. 0: as the server chooses."
        ),
    ] = 0,
    r: Annotated[
        int, typer.Option("--r", min=1, max=MAX_LORA_RANK, help="Rank of the LoRA adapter, on all linear modules.")
    ] = 16,
    dropout: Annotated[float, typer.Option("--lora-dropout", min=0.0, max=0.99, help="Of the adapter's inputs.")] = 0.0,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Compute activations again in the backward pass.")
    ] = False,
    activation_memory: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="GiB that activations may take: micro-batches and what their layers keep are chosen to fit.",
            show_default=False,
        ),
    ] = None,
    num_steps: _Steps = None,
    num_warmup_steps: Annotated[int, typer.Option("--warmup-steps", min=0, help="Steps before them.")] = 3,
    num_samples: _Samples = None,
    load_format: Annotated[str, typer.Option(help="dummy: random weights.")] = "auto",
    dtype: Annotated[str, typer.Option()] = "auto",
    device: Annotated[str, typer.Option()] = "auto",
    label: Annotated[str, typer.Option(help="A name for these figures.")] = "cotenant",
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here.", show_default=False)
    ] = None,
) -> None:
    """Train a LoRA adapter on random tokens without a server: speed, beside the matrix rate measured in the same run,
    memory, the times of tasklets, and how soon training stops and gives its activations back.
    """
    chosen, limit = model_to_measure(model, load_format, dtype, device)
    # Here and not above: torch takes seconds to import, and `cotenant --help` has no use for it.
    from cotenant.bench.machine import command_line, machine, versions
    from cotenant.runtime.build import runs_on_cuda
    from cotenant.runtime.finetune_bench import open_bench
    from cotenant.runtime.finetune_workload import Workload

    usual_tokens, usual_steps, usual_samples = (
        (_TOKENS_PER_STEP, _STEPS, _SAMPLES)
        if runs_on_cuda(device)
        else (_CPU_TOKENS_PER_STEP, _CPU_STEPS, _CPU_SAMPLES)
    )
    seq_len, tokens_per_step = choose_rows(model, limit, seq_len, tokens_per_step, usual_tokens)
    if min_len is not None and min_len > seq_len:
        raise InvalidInputError(f"--min-len: {min_len} is more than --seq-len {seq_len}", param="min-len")
    check_outputs(json=json_path)
    most_bytes = None if activation_memory is None else int(activation_memory * 2**30)
    workload = Workload(
        seq_len, tokens_per_step, tasklet_tokens, r, gradient_checkpointing, min_len, most_bytes, dropout
    )
    say_phase(f"loading {model}, and timing the device")
    bench = open_bench(chosen, workload)
    report = {
        "kind": KIND,
        "label": label,
        **bench.description(),
        **_measure(bench, num_steps or usual_steps, num_warmup_steps, num_samples or usual_samples),
        "machine": machine(),
        "versions": versions(),
        "command": command_line(["cotenant", *sys.argv[1:]]),
    }
    bench.close()
    if json_path is not None:
        write_json(json_path, report)
    _print(report)  # last: whoever reads it may be gone


def _measure(bench: FinetuneBench, num_steps: int, num_warmup_steps: int, num_samples: int) -> dict[str, Any]:
    """One measurement after the other, as they stand in the JSON."""
    say_phase(f"warming up: {counted(num_warmup_steps, 'step')}")
    bench.warm_up(num_warmup_steps)
    say_phase(f"timing {counted(num_steps, 'step')}")
    figures = bench.steps(num_steps)
    say_phase(f"uncut: {counted(num_steps, 'pair')} of steps")
    figures["uncut"] = bench.uncut(num_steps)
    say_phase(f"suspend: {counted(num_samples, 'sample')}")
    figures["suspend"] = bench.suspend(num_samples)
    say_phase(f"discard: {counted(num_samples, 'sample')}")
    figures["discard"] = bench.discard(num_samples)
    if bench.has_arena:
        say_phase(f"require: {counted(num_samples, 'sample')}")
    figures["require"] = bench.require(num_samples, _REQUIRED_BYTES)
    return figures


def choose_rows(
    model: str, limit: int, seq_len: int | None, tokens_per_step: int | None, usual_tokens: int
) -> tuple[int, int]:
    """Tokens of a row and of an optimizer step: what is not given (None) is as usual, or what ``model`` takes, which is
    ``limit`` tokens, and whole rows. Raises InvalidInputError where it cannot train on what is given."""
    seq_len = min(_SEQ_LEN, limit) if seq_len is None else seq_len
    if tokens_per_step is None:
        tokens_per_step = max(1, usual_tokens // seq_len) * seq_len
    if seq_len > limit:
        raise InvalidInputError(f"--seq-len: {seq_len} is too long: {model} takes {limit} tokens", param="seq-len")
    if tokens_per_step % seq_len:
        raise InvalidInputError(
            f"--tokens-per-step: {tokens_per_step} is not a multiple of --seq-len {seq_len}", param="tokens-per-step"
        )
    return seq_len, tokens_per_step


def _print(report: dict[str, Any]) -> None:
    speed, memory, cpu_share = report["tokens_per_s"], report["memory"], report["cpu_share"]
    console = open_console(highlight=True)
    console.print(
        f"{report['model']}, {report['dtype']}, on {report['device']}: {report['num_micro_batches']} micro-batches of "
        f"{report['micro_batch_tokens']} tokens a step; {report['num_recomputed_layers']} layers computed again"
    )
    console.print(
        f"{speed['mean']:.0f} tokens/s (steps: p10 {speed['p10']:.0f}, p90 {speed['p90']:.0f}), "
        f"{report['share_of_matmul_rate']:.1%} of {_rate(report['ceilings']['matmul_tflop_s'])} at "
        f"{report['flop_per_token'] / 1e9:.3g} GFLOP a token"
    )
    peaks = ", ".join(
        f"{name.removeprefix('peak_').removesuffix('_bytes')} {size / 2**30:.2f} GiB" for name, size in memory.items()
    )
    console.print(
        f"peak memory: {peaks}; CPU of the launching thread: {cpu_share['launching_thread']:.1%} of the time, "
        f"{cpu_share['launching']:.1%} in launching"
    )
    uncut = report["uncut"]
    less_or_more = "less" if uncut["difference"] < 0 else "more"
    console.print(f"steps cut into tasklets take {abs(uncut['difference']):.2%} {less_or_more} time than uncut ones")
    table = new_table("ms", "count", "p50", "p10", "p90", "p99", "max")
    table.add_row("step", str(report["num_steps"]), *_cells(report["step_ms"]))
    for kind, times in report["tasklet_ms"].items():
        table.add_row(f"tasklet: {kind}", str(times["count"]), *_cells(times))
    for name in ("suspend", "discard", "require"):
        if report[name] is None:
            continue
        table.add_row(name, str(report[name]["num_samples"]), *_cells(report[name]["latency_ms"]))
    console.print(table)


def _rate(tflop_s: float) -> str:
    return f"{tflop_s:.1f} TFLOP/s" if tflop_s >= 1 else f"{tflop_s * 1e3:.3g} GFLOP/s"


def _cells(spread: dict[str, float]) -> list[str]:
    return [f"{spread[share]:.3f}" for share in ("p50", "p10", "p90", "p99", "max")]
