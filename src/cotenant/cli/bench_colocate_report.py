"""``cotenant bench colocate-report``: compare and draw again what `cotenant bench colocate` has measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cotenant.bench.colocate_text import with_parts
from cotenant.bench.comparison import compare
from cotenant.cli.colocate_output import tell
from cotenant.cli.colocate_parts import joined, num_repeated, read_report, unlike_rounds
from cotenant.cli.output import check_apart, check_outputs, counted, say_phase
from cotenant.core.output_file import make_way


def colocate_report(
    files: Annotated[
        list[Path], typer.Argument(help="What `cotenant bench colocate --json` has written; several are one grid.")
    ],
    html_path: Annotated[
        Path | None, typer.Option("--html", help="Write the report with charts here.", show_default=False)
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the cells of all files here, as one.", show_default=False)
    ] = None,
    slo_attainment: Annotated[
        float | None,
        typer.Option(min=0.001, max=0.9999, help="As for `colocate`; else as it was there.", show_default=False),
    ] = None,
) -> None:
    """Compare policies by what was measured before, also in several runs, and write the report with charts; of a run
    that was cut off, as far as it came."""
    check_outputs(json=json_path, html=html_path)
    check_apart({"json": json_path, "html": html_path})
    check_apart({"html": html_path}, files)
    parts = {str(file): read_report(file) for file in files}
    report = joined(parts)
    if rounds := unlike_rounds(parts):
        say_phase(f"warning: cells are of unlike numbers of rounds, and a mean of more is the surer: {rounds}")
    if count := num_repeated(parts):
        told = f"{counted(count, 'cell')} in several files: that of the most rounds counts, or else the last file's"
        say_phase(f"warning: {told}")
    report["cells"] = with_parts(report["cells"])
    report["comparison"] = compare(report, slo_attainment or report["slo_attainment"])
    if json_path is not None and json_path.resolve() in {file.resolve() for file in files}:
        make_way(json_path)
    tell(report, json_path, html_path)
