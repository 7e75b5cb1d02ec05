"""``cotenant bench engine``: decode steps and prompts in this process, beside what the device could do at best."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.cli.options import model_to_measure, whole_numbers
from cotenant.cli.output import check_outputs, counted, say_phase, write_json
from cotenant.cli.tables import new_table, open_console
from cotenant.config import (
    COMPRESS_WEIGHTS,
    MAX_LORA_RANK,
    BatchConfig,
    CacheConfig,
    CoExecutionConfig,
    LoraConfig,
    ServerConfig,
)
from cotenant.core.errors import InvalidInputError

if TYPE_CHECKING:
    from cotenant.core.request import AdapterRef
    from cotenant.runtime.engine_bench import EngineBench

KIND = "engine"
_BATCH_SIZES, _PROMPT_LENGTHS = (1, 8, 32, 128, 256), (512, 2048, 4000)
# On a CPU, where steps of many sequences and long prompts take long even of the built-in model.
_CPU_BATCH_SIZES, _CPU_PROMPT_LENGTHS = (1, 8, 32), (512,)


def _listed(values: Sequence[int]) -> str:
    """As a flag has them."""
    return ",".join(map(str, values))


def engine(
    model: Annotated[str, typer.Argument(help="As for `cotenant serve`.")],
    batch_sizes: Annotated[
        str | None,
        typer.Option(
            help=f"Sequences in a decode step, one row each. Default: {_listed(_BATCH_SIZES)}; on a CPU "
            f"{_listed(_CPU_BATCH_SIZES)}.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each sequence, about.")] = 545,
    prompt_lengths: Annotated[
        str | None,
        typer.Option(
            help=f"Tokens of a prompt alone, one row each. Default: those of {_listed(_PROMPT_LENGTHS)} that the model "
            f"takes; on a CPU {_listed(_CPU_PROMPT_LENGTHS)}.",
            show_default=False,
        ),
    ] = None,
    num_steps: Annotated[int, typer.Option(min=8, help="Decode steps that are timed, per row.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts that are timed, per row.")] = 10,
    num_adapters: Annotated[
        str, typer.Option(help="Also decode with so many LoRA adapters in the batch, e.g. 8,64.")
    ] = "",
    lora_rank: Annotated[int, typer.Option(min=1, max=MAX_LORA_RANK, help="Their rank.")] = 16,
    lora_batch_size: Annotated[int, typer.Option(min=1, help="Sequences in steps with adapters.")] = 64,
    load_format: Annotated[str, typer.Option(help="dummy: random weights.")] = "auto",
    dtype: Annotated[str, typer.Option()] = "auto",
    quantization: Annotated[str | None, typer.Option(help="fp8, or none.", show_default=False)] = None,
    compress_weights: Annotated[str, typer.Option(help=", ".join(COMPRESS_WEIGHTS) + ".")] = "auto",
    device: Annotated[str, typer.Option()] = "auto",
    max_num_batched_tokens: Annotated[int, typer.Option(help="0: as the server chooses.")] = 0,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="No captured graphs.")] = False,
    label: Annotated[str, typer.Option(help="A name for these figures.")] = "cotenant",
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here.", show_default=False)
    ] = None,
) -> None:
    """Time decode steps and prompts without a server, and compare them with the floor: the bytes that must be read and
    the arithmetic that must be done, at the bandwidth and the matrix rate measured in the same run.
    """
    sizes = None if batch_sizes is None else whole_numbers(batch_sizes, "batch-sizes")
    adapters = whole_numbers(num_adapters, "num-adapters") if num_adapters else []
    chosen, limit = model_to_measure(model, load_format, dtype, device, quantization, compress_weights)
    lengths = None if prompt_lengths is None else _prompt_lengths(prompt_lengths, model, limit)
    check_outputs(json=json_path)
    # Here and not above: torch takes seconds to import, and `cotenant --help` has no use for it.
    from cotenant.runtime.build import runs_on_cuda
    from cotenant.runtime.engine_bench import open_bench

    on_cuda = runs_on_cuda(device)
    if sizes is None:
        sizes = list(_BATCH_SIZES if on_cuda else _CPU_BATCH_SIZES)
    if lengths is None:
        usual = _PROMPT_LENGTHS if on_cuda else _CPU_PROMPT_LENGTHS
        lengths = [length for length in usual if length < limit] or [limit - 1]
    most = max([*sizes, lora_batch_size if adapters else 1])
    _check_context(context, num_steps, most, model, limit)
    config = ServerConfig(
        model=replace(chosen, max_model_len=min(limit, _model_len(lengths, context, num_steps))),
        cache=CacheConfig(enable_prefix_caching=False),  # every prompt is computed
        batch=BatchConfig(
            max_num_seqs=most,
            max_num_batched_tokens=max_num_batched_tokens or max(4096, most),
            enforce_eager=enforce_eager,
        ),
        lora=LoraConfig(max_loras=max([8, *adapters]), max_lora_rank=max(16, lora_rank)),
        coexecution=CoExecutionConfig(policy="inference-only"),
    )
    say_phase(f"loading {model}, and timing the device")
    bench = open_bench(config)
    decode = [_decode(bench, size, context, num_steps) for size in sizes]
    prefill = [_prefill(bench, length, repeats) for length in lengths]
    if adapters:
        decode.append(_decode(bench, lora_batch_size, context, num_steps))
        refs = bench.random_adapters(max(adapters), lora_rank)
        decode += [_decode(bench, lora_batch_size, context, num_steps, refs[:count]) for count in adapters]
    report = _report(bench, label, decode, prefill)
    if json_path is not None:
        write_json(json_path, report)
    _print(report)  # last: whoever reads it may be gone


def _decode(
    bench: EngineBench, batch_size: int, context: int, num_steps: int, adapters: Sequence[AdapterRef] = ()
) -> dict[str, Any]:
    with_adapters = f" with {counted(len(adapters), 'adapter')}" if adapters else ""
    say_phase(f"decode: batches of {batch_size}{with_adapters}, {counted(num_steps, 'step')} timed")
    return bench.decode(batch_size, context, num_steps, adapters)


def _prefill(bench: EngineBench, num_tokens: int, repeats: int) -> dict[str, Any]:
    say_phase(f"prompts of {counted(num_tokens, 'token')}: {repeats} timed")
    return bench.prefill(num_tokens, repeats)


def _prompt_lengths(text: str, model: str, limit: int) -> list[int]:
    """The lengths asked for, which have to be below the model's ``limit``: that counts the answer too."""
    lengths = whole_numbers(text, "prompt-lengths")
    if max(lengths) >= limit:
        raise InvalidInputError(
            f"--prompt-lengths: {max(lengths)} is too long: {model} takes {limit} tokens, the answer's included",
            param="prompt-lengths",
        )
    return lengths


def _check_context(context: int, num_steps: int, batch_size: int, model: str, limit: int) -> None:
    """Raise InvalidInputError where sequences would end before the last of their steps is timed.

    Each begins with ``context`` less half of the steps, and decodes until all of the batch are in and timed.
    """
    most = limit - num_steps - batch_size - 72 + num_steps // 2
    if context > most:
        raise InvalidInputError(
            f"--context: {context} is too long: {model} takes {limit} tokens, and {num_steps} steps of {batch_size} "
            f"sequences leave {max(0, most)}",
            param="context",
        )


def _model_len(lengths: list[int], context: int, num_steps: int) -> int:
    """Room for the longest prompt, and for a decoding sequence however long the others take to come in."""
    return max(max(lengths) + 16, context + 2 * num_steps + 1024)


def _report(
    bench: EngineBench, label: str, decode: list[dict[str, Any]], prefill: list[dict[str, Any]]
) -> dict[str, Any]:
    from cotenant.bench.machine import command_line, machine, versions

    return {
        "kind": KIND,
        "label": label,
        **bench.description(),
        "decode": decode,
        "prefill": prefill,
        "machine": machine(),
        "versions": versions(),
        "command": command_line(["cotenant", *sys.argv[1:]]),
    }


def _print(report: dict[str, Any]) -> None:
    ceilings = report["ceilings"]
    console = open_console(highlight=True)
    console.print(
        f"{report['model']}, {report['dtype']}, on {report['device']}: copy {ceilings['copy_gb_s']:.0f} GB/s, "
        f"matrix product {ceilings['matmul_tflop_s']:.1f} TFLOP/s"
    )
    table = new_table("", "ms, median", "p10", "p90", "floor", "times the floor", "gap between steps, µs")
    for row in report["decode"]:
        with_adapters = f", {row['num_adapters']} adapters" if row["num_adapters"] else ""
        name = f"decode {row['batch_size']}, context {row['context']}{with_adapters}"
        gap = f"{row['gap_us']['p50']:.0f}" if row["gap_us"] else ""
        table.add_row(name, *_cells(row, "step_ms"), gap)
    for row in report["prefill"]:
        table.add_row(f"prompt of {row['num_tokens']}", *_cells(row, "prefill_ms"), "")
    console.print(table)


def _cells(row: dict[str, Any], key: str) -> list[str]:
    spread = row[key]
    times = [f"{spread[share]:.3f}" for share in ("p50", "p10", "p90")]
    return [*times, f"{row['floor_ms']:.3f}", f"{row['ratio_to_floor']:.2f}"]
