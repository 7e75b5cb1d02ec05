"""Tables for people: as wide as they are in a file or a pipe, and without cropped cells on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

_NO_LIMIT = 10_000  # characters of a line


def open_console(*, highlight: bool = False) -> Console:
    """Of stdout. What is no terminal has no width at which lines would have to end. Names stay as they are: a model's
    ``:fire:`` is no sign for a picture."""
    console = Console(highlight=highlight, emoji=False)
    if not console.is_terminal:
        console.width = _NO_LIMIT
    return console


def print_rows(
    console: Console,
    columns: Sequence[str],
    rows: Sequence[Mapping[str, str]],
    dropped_first: Sequence[str] = (),
) -> None:
    """Print the rows' ``columns``. Where the terminal is too narrow those of ``dropped_first`` are left out, one after
    the other, until the others fit; what is too long even then goes on in the next line."""
    shown = list(columns)
    table = _table(shown, rows)
    for name in dropped_first:
        if _width(console, table) <= console.width:
            break
        shown.remove(name)
        table = _table(shown, rows)
    console.print(table)


def new_table(*columns: str, title: str | None = None) -> Table:
    """What is too long for its cell goes on in the next line."""
    return Table(*(Column(name, overflow="fold") for name in columns), title=title)


def _table(columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> Table:
    table = new_table(*columns)
    for row in rows:
        table.add_row(*(escape(row[name]) for name in columns))
    return table


def _width(console: Console, table: Table) -> int:
    """Characters of a line that nothing in the table would be wrapped at."""
    return console.measure(table, options=console.options.update(width=_NO_LIMIT)).maximum
