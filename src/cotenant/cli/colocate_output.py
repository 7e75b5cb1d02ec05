"""What `cotenant bench colocate` writes and prints of its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from cotenant.bench.colocate_report import report_page
from cotenant.bench.colocate_text import HEADER, comparison_lines, place_name, table_row
from cotenant.bench.device_losses import HEADER as LOSS_HEADER
from cotenant.bench.device_losses import NOTE as LOSS_NOTE
from cotenant.bench.device_losses import loss_rows
from cotenant.cli.output import write_json, write_text
from cotenant.cli.tables import new_table, open_console


def tell(report: dict[str, Any], json_path: Path | None, html_path: Path | None) -> None:
    """Files, where they are asked for, and tables."""
    if json_path is not None:
        write_json(json_path, report, is_compact=True)
    if html_path is not None:
        write_text("html", html_path, report_page(report))
    _print(report)  # last: whoever reads it may be gone


def _print(report: dict[str, Any]) -> None:
    console = open_console(highlight=True)
    table = new_table(*HEADER)
    for cell in report["cells"]:
        table.add_row(*map(escape, table_row(cell)))
    console.print(table)
    _print_losses(console, report)
    averages = new_table("policy", "training tokens/s on average where the SLO is met")
    for policy, value in report["comparison"]["averages"].items():
        averages.add_row(policy, "-" if value is None else f"{value:.0f}")
    console.print(averages)
    for text in (*comparison_lines(report["comparison"]), *report.get("notes", ())):
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def _print_losses(console: Console, report: dict[str, Any]) -> None:
    rows = loss_rows(report["cells"])
    if not rows:
        return
    table = new_table("place", "policy", *LOSS_HEADER, title="where the device's time goes")
    for cell, shares in rows:
        table.add_row(*map(escape, (place_name(cell), cell["policy"], *shares)))
    console.print(table)
    console.print(LOSS_NOTE, highlight=False, markup=False, soft_wrap=True)
