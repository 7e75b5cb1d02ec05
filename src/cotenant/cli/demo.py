"""``cotenant demo``: the main job, measured, in a few minutes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from cotenant.cli.output import check_folder, fail
from cotenant.cli.tables import open_console
from cotenant.config import POLICIES
from cotenant.core.errors import InvalidInputError


def demo(
    output: Annotated[Path, typer.Option(help="Folder for the report; emptied first.")] = Path("demo-report"),
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
    if not _may_be_emptied(output):
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
        fail(f"the demo could not be measured: {reasons}; the server's log is {output / 'server.log'}", exit_code=1)
    print_table(report, console)
    console.print(f"\nreport: {output / 'report.html'} and {output / 'report.json'}")


def _check_trains(option: str, policy: str) -> None:
    if policy not in POLICIES:
        raise InvalidInputError(f"--{option} must be one of {', '.join(POLICIES)}, not {policy!r}", param=option)
    if policy == "inference-only":
        raise InvalidInputError(f"--{option} inference-only never trains, so there is nothing to compare", param=option)


def _may_be_emptied(folder: Path) -> bool:
    """Only what a demo has written is deleted: the folder's name came from a person, who may have mistyped it."""
    if not folder.exists():
        return True
    was_written_by_us = any((folder / name).is_file() for name in ("server.log", "report.json"))
    return folder.is_dir() and (was_written_by_us or not any(folder.iterdir()))
