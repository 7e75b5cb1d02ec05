"""``cotenant bench colocate-report``: compare and draw again what `cotenant bench colocate` has measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cotenant.bench.colocate_report import report_page
from cotenant.bench.colocate_text import comparison_lines, with_parts
from cotenant.bench.comparison import compare
from cotenant.cli.colocate_parts import joined, read_report, unlike_rounds
from cotenant.cli.output import check_apart, check_outputs, say_phase, write_json, write_text


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
    report["cells"] = with_parts(report["cells"])
    report["comparison"] = compare(report, slo_attainment or report["slo_attainment"])
    if json_path is not None:
        write_json(json_path, report, is_compact=True)
    if html_path is not None:
        write_text("html", html_path, report_page(report))
    for line in comparison_lines(report["comparison"]):
        typer.echo(line)
