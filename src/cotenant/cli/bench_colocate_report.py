"""``cotenant bench colocate-report``: compare and draw again what `cotenant bench colocate` has measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from cotenant.bench.colocate_text import comparison_lines
from cotenant.bench.comparison import compare
from cotenant.cli.bench_colocate import KIND, save_html
from cotenant.core.errors import InvalidInputError


def colocate_report(
    file: Annotated[Path, typer.Argument(help="What `cotenant bench colocate --json` has written.")],
    html_path: Annotated[Path, typer.Option("--html", help="Write the report here.")],
    slo_attainment: Annotated[
        float | None,
        typer.Option(min=0.001, max=0.9999, help="As for `colocate`; else as it was there.", show_default=False),
    ] = None,
) -> None:
    """Write the report with charts of a run that was measured before; of one that was cut off, as far as it came."""
    report = _read(file)
    report["comparison"] = compare(report, slo_attainment or report["slo_attainment"])
    save_html(html_path, report)
    for line in comparison_lines(report["comparison"]):
        typer.echo(line)


def _read(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}", param="file") from error
    if not isinstance(report, dict) or report.get("kind") != KIND:
        raise InvalidInputError(f"{path} is not what `cotenant bench colocate --json` writes", param="file")
    return {"slo_attainment": 0.99, **report}
