"""``cotenant demo``: the main job, measured, in a few minutes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from cotenant.bench.demo_folder import LOG, PAGE, REPORT, may_hold_a_demo
from cotenant.cli.interruption import sigterm_as_interrupt
from cotenant.cli.output import check_folder, fail
from cotenant.cli.tables import open_console
from cotenant.config import POLICIES
from cotenant.core.errors import InvalidInputError


@sigterm_as_interrupt()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for the report, which takes an earlier one's place.")] = Path(
        "demo-report"
    ),
    policy: Annotated[str, typer.Option(help=f"One of {', '.join(POLICIES)}.")] = "adaptive",
    beside: Annotated[
        str, typer.Option(help="A second policy, measured for 20 s more; '' for none. Skipped if it equals --policy.")
    ] = "whole-step",
    request_rate: Annotated[float, typer.Option(min=0.1, help="Chat requests a second.")] = 3.0,
    corun_seconds: Annotated[float, typer.Option(min=5.0, help="How long requests and training run together.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Seed of the traffic and the job.")] = 0,
    fuse: Annotated[bool, typer.Option(help="Let forward tasklets run inside batches.")] = True,
) -> None:
    """Serve the built-in model, fine-tune it under chat traffic, and report what each did to the other."""
    _check_trains("policy", policy)
    if beside:
        _check_trains("beside", beside)
    check_folder("output", output)
    if not may_hold_a_demo(output):
        raise InvalidInputError(
            f"--output: {output} is not a folder of an earlier demo and not empty; name another one", param="output"
        )
    # Here and not above: the other commands should not wait for it.
    from httpx import HTTPError

    from cotenant.bench.client import ServerError
    from cotenant.bench.demo import Demo, DemoOptions, print_table

    console = open_console(highlight=True)
    options = DemoOptions(
        output,
        policy=policy,
        beside="" if beside == policy else beside,
        rate_per_s=request_rate,
        corun_s=corun_seconds,
        seed=seed,
        fuse=fuse,
    )
    try:
        report = asyncio.run(Demo(options, console).run())
    except* (ServerError, HTTPError, OSError) as group:
        reasons = "; ".join(f"{type(error).__name__}: {error}" for error in group.exceptions)
        fail(f"the demo could not be measured: {reasons}; the server's log is {output / LOG}", exit_code=1)
    print_table(report, console)
    console.print(f"\nreport: {output / PAGE} and {output / REPORT}")


def _check_trains(option: str, policy: str) -> None:
    if policy not in POLICIES:
        raise InvalidInputError(f"--{option} must be one of {', '.join(POLICIES)}, not {policy!r}", param=option)
    if policy == "inference-only":
        raise InvalidInputError(f"--{option} inference-only never trains, so there is nothing to compare", param=option)
