"""Tables in windows of any width, and in none."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cotenant.cli.tables import new_table, open_console, print_rows

COLUMNS = ("job", "status", "model", "created", "result")
ROW = {
    "job": "ftjob-0123456789abcdef01234567",
    "status": "validating_files",
    "model": "ft:tiny:local:numbers:a1b2c3",
    "created": "2026-11-24 00:27:54",
    "result": "ft:tiny:local:numbers-again:d4e5f6",
}


def shown(width: int) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, highlight=False)
    print_rows(console, COLUMNS, [ROW], dropped_first=("created", "result"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(("width", "dropped"), [(150, set()), (130, {"created"}), (90, {"created", "result"})])
def test_the_least_important_columns_give_way_and_nothing_is_cropped(width: int, dropped: set[str]) -> None:
    text = shown(width)
    assert {name for name, cell in ROW.items() if cell not in text} == dropped
    assert "…" not in text


def test_what_is_too_long_even_then_goes_on_in_the_next_line() -> None:
    cells = [line.split("│")[1:-1] for line in shown(60).splitlines() if line.startswith("│")]
    job, status, model = ("".join(parts).replace(" ", "") for parts in zip(*cells, strict=True))
    assert (job, status, model) == (ROW["job"], ROW["status"], ROW["model"])


def test_a_table_without_columns_that_can_go_crops_nothing_either() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=40, color_system=None)
    table = new_table("policy", "training tokens/s on average", title="a title")
    table.add_row("inference-only-of-a-very-long-name", "123456789.0")
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "…" not in text
    cells = [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│")]
    assert "".join(cells) == "inference-only-of-a-very-long-name"


def test_a_pipe_has_no_width(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    status = "[bold]:fire:" * 40
    print_rows(open_console(), COLUMNS, [{**ROW, "status": status}], dropped_first=("created",))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if ROW["job"] in line]
    assert status in line, "names stay as they are"
    assert ROW["created"] in line
