"""``cotenant profile``: measure what the planner wants to know, before a server meets it under load."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from cotenant.cli.interruption import INTERRUPTED_EXIT_CODE, sigterm_as_interrupt
from cotenant.cli.options import MOST_ALONE_S, folder_of_data, model_to_measure, whole_numbers
from cotenant.cli.output import check_folder, counted, fail
from cotenant.config import (
    COMPRESS_WEIGHTS,
    DEFAULT_DATA_DIR,
    BatchConfig,
    CacheConfig,
    CoExecutionConfig,
    ServerConfig,
)
from cotenant.core.errors import InvalidInputError

if TYPE_CHECKING:
    from cotenant.runtime.colocate_bench import ColocateBench

_NUM_TOKENS = 24  # of each sequence, for each shape
_TASKLETS = 4  # beside each step, if all take as long as the longest
_SEQ_LEN, _ROWS = 2048, 2  # of the training beside them


@sigterm_as_interrupt()
def profile(
    model: Annotated[str, typer.Argument(help="As for `cotenant serve`.")],
    batch_sizes: Annotated[str, typer.Option(help="Sequences that decode together.")] = "1,4,8,16,32,64,128",
    contexts: Annotated[str, typer.Option(help="Tokens of each of them, about.")] = "256,1024,2048",
    policy: Annotated[
        str, typer.Option(help="The server's, which says what partitions of the SMs there are.")
    ] = "adaptive",
    sm_shares: Annotated[list[float] | None, typer.Option(help="As for `cotenant serve`.", show_default=False)] = None,
    tasklet_tokens: Annotated[
        int | None, typer.Option(min=16, help="As for `cotenant serve`.", show_default=False)
    ] = None,
    alone_seconds: Annotated[
        float, typer.Option(min=0.1, max=MOST_ALONE_S, help="How long training is measured by itself.")
    ] = 5.0,
    load_format: Annotated[str, typer.Option(help="dummy: random weights.")] = "auto",
    dtype: Annotated[str, typer.Option()] = "auto",
    quantization: Annotated[str | None, typer.Option(help="fp8, or none.", show_default=False)] = None,
    compress_weights: Annotated[str, typer.Option(help=", ".join(COMPRESS_WEIGHTS) + ".")] = "auto",
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="As for `cotenant serve`.")
    ] = CacheConfig().gpu_memory_utilization,
    device: Annotated[str, typer.Option()] = "auto",
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="As for `cotenant serve`.")] = False,
    data_dir: Annotated[str, typer.Option(help="Where a server with this folder finds them.")] = str(DEFAULT_DATA_DIR),
) -> None:
    """Measure decode steps alone and beside training, also in each partition of a GPU's SMs, and training's tasklets,
    and keep the latencies in the data folder: a server that starts there plans with them from its first iteration. What
    else it meets it learns by itself."""
    coexecution = _coexecution(policy, tasklet_tokens, sm_shares)
    chosen, limit = model_to_measure(model, load_format, dtype, device, quantization, compress_weights)
    sizes, lengths = whole_numbers(batch_sizes, "batch-sizes"), whole_numbers(contexts, "contexts")
    # Here and not above: torch takes seconds to import, the store a part of one, and `cotenant --help` needs neither.
    from cotenant.runtime.build import default_tasklet_tokens
    from cotenant.runtime.colocate_bench import ColocateBench
    from cotenant.runtime.finetune_workload import Workload
    from cotenant.runtime.latency_file import LATENCY_FOLDER
    from cotenant.runtime.steady import profile_len
    from cotenant.store import lock_folder

    def longest(shape: tuple[int, int]) -> int:
        return profile_len(*shape, _NUM_TOKENS)

    asked = list(itertools.product(sizes, lengths))
    shapes = [shape for shape in asked if longest(shape) <= limit]
    if not shapes:
        raise InvalidInputError(
            f"--batch-sizes, --contexts: {model} takes {limit} tokens, and the shortest of these take up to "
            f"{min(map(longest, asked))} with those before the timing, more for more sequences; ask for fewer",
            param="contexts",
        )
    folder = folder_of_data(data_dir)
    config = ServerConfig(
        model=replace(chosen, max_model_len=max(map(longest, shapes))),
        cache=CacheConfig(gpu_memory_utilization=gpu_memory_utilization),
        batch=BatchConfig(max_queue=1_000_000, enforce_eager=enforce_eager),
        coexecution=coexecution,
        data_dir=str(folder),
    )
    # An example is never cut: longer ones would be micro-batches longer than a job's.
    seq_len = min(_SEQ_LEN, limit, tasklet_tokens or default_tasklet_tokens(device))
    workload = Workload(seq_len, _ROWS * seq_len, tasklet_tokens or 0, 16, False)
    check_folder("data-dir", folder / LATENCY_FOLDER)
    # A server there would sooner or later write what it has learned itself over what is measured here.
    lock = lock_folder(folder, "`cotenant profile`")
    start_s, was_interrupted = time.perf_counter(), False
    why = f"{model} takes {limit} tokens, and with those before the timing these are more"
    _say_left_out(why, [shape for shape in asked if longest(shape) > limit])
    try:
        with ColocateBench(config, workload, uses_data_dir=True) as bench:
            try:
                _measure(bench, shapes, alone_seconds)
            except KeyboardInterrupt:  # what was measured so far is as good
                was_interrupted = True
            try:
                num_records, path = bench.save_latencies()
            except OSError as error:
                fail(f"--data-dir: latencies cannot be kept in {folder}: {error}", exit_code=1)
    finally:
        lock.release()
    typer.echo(f"{num_records} latencies in {time.perf_counter() - start_s:.0f} s: {path}")
    if was_interrupted:
        fail("interrupted: what was measured so far is kept", exit_code=INTERRUPTED_EXIT_CODE)


def _coexecution(policy: str, tasklet_tokens: int | None, sm_shares: Sequence[float] | None) -> CoExecutionConfig:
    """The server's. Raises InvalidInputError for one under which nothing trains."""
    shares = None if sm_shares is None else tuple(sm_shares)
    found = CoExecutionConfig(policy, tasklet_tokens=tasklet_tokens, sm_shares=shares)
    if not found.trains:
        raise InvalidInputError(f"--policy: under {policy} nothing trains that could be measured", param="policy")
    return found


def _measure(bench: ColocateBench, shapes: Sequence[tuple[int, int]], alone_seconds: float) -> None:
    """Each of these shapes, a number of sequences and their tokens, and say what came of it."""
    alone = bench.alone(alone_seconds)
    most = bench.max_num_seqs
    _say_left_out(f"a batch has {most} sequences", [shape for shape in shapes if shape[0] > most])
    for size, length in (shape for shape in shapes if shape[0] <= most):
        # Whatever the targets will be: some tasklets run beside each step, and no more.
        found = bench.profile(_TASKLETS * bench.longest_tasklet_ms, size, length, _NUM_TOKENS)
        beside = f"{found.beside_ms:.2f} ms with {found.tasklets_per_step:.1f} tasklets of training beside it"
        typer.echo(
            f"{counted(size, 'sequence')} of about {counted(length, 'token')}: {found.alone_ms:.2f} ms a step alone, "
            f"{beside if found.tasklets_per_step >= 0.05 else 'and no tasklet ran beside it'}"
        )
        for each in found.shared:
            typer.echo(
                f"  on {each.partition.online_sms} of {each.partition.num_sms} SMs: {each.step_ms:.2f} ms, "
                f"training on the others at {each.train_tokens_per_s / alone:.0%} of its speed alone"
            )


def _say_left_out(reason: str, shapes: Sequence[tuple[int, int]]) -> None:
    if shapes:
        listed = ", ".join(f"{size} x {length}" for size, length in shapes)
        typer.echo(f"left out, for {reason}: {listed}", err=True)
