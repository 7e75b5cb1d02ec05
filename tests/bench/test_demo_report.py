"""The demo's table and page show what was measured, with a second policy and without one."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from cotenant.bench.demo import print_table, seconds_to_go
from cotenant.bench.report import table_header, table_rows, write_html, write_json
from cotenant.bench.summary import RequestResult, Targets, summarize

TARGETS = Targets(40.0, 10.0)


def requests(ttft_ms: float, tpot_ms: float, num: int) -> list[RequestResult]:
    return [RequestResult(float(index), ttft_ms, tpot_ms, ttft_ms + 9 * tpot_ms, 10) for index in range(num)]


ALONE, CORUN, BESIDE = requests(10.0, 2.5, 50), requests(12.0, 7.0, 150), requests(60.0, 75.0, 49)


def measured(beside: str = "") -> dict[str, Any]:
    report: dict[str, Any] = {
        "policy": "adaptive",
        "machine": {"cpu": "A CPU", "num_cores": 2},
        "online": {"alone": summarize(ALONE, TARGETS, 20.0), "corun": summarize(CORUN, TARGETS, 60.0)},
        "iterations": {"none": 9, "fused": 0, "temporal": 200, "spatial": 0},
        "finetune": {"alone_tokens_per_s": 4000.0, "corun_tokens_per_s": 3000.0, "harvest": 0.75, "loss": [5.5, 0.25]},
        "answers": {"question": "Who?", "base": "I do not know.", "tuned": "Moss & co."},
    }
    if beside:
        report["beside"] = {
            "policy": beside,
            "online": {"corun": summarize(BESIDE, TARGETS, 20.0)},
            "iterations": {"none": 3, "fused": 12, "temporal": 40},
            "finetune": {"corun_tokens_per_s": 3600.0, "harvest": 0.9},
        }
    return report


ROWS = {
    "requests": ("50", "150", "49"),
    "TTFT (target 40 ms) p50 / p99, ms": ("10.0 / 10.0", "12.0 / 12.0", "60.0 / 60.0"),
    "TPOT (target 10.0 ms) p50 / p99, ms": ("2.5 / 2.5", "7.0 / 7.0", "75.0 / 75.0"),
    "SLO attainment": ("100.0%", "100.0%", "0.0%"),
    "training, tokens/s (alone: no requests)": ("4000", "3000 (75% of alone)", "3600 (90% of alone)"),
    "turns of the loop, with requests or without": (
        "",
        "200 temporal, 9 without training",
        "12 fused, 40 temporal, 3 without training",
    ),
    "training loss, first → last": ("", "5.500 → 0.250", ""),
}
HEADER = ["", "requests alone", "with the job, adaptive", "with the job, whole-step"]


@pytest.mark.parametrize(("beside", "num_columns"), [("", 3), ("whole-step", 4)])
def test_the_table_has_a_column_for_each_policy_measured(beside: str, num_columns: int) -> None:
    report = measured(beside)
    assert table_header(report) == HEADER[:num_columns]
    assert table_rows(report) == [(name, *cells[: num_columns - 1]) for name, cells in ROWS.items()]
    printed = io.StringIO()
    print_table(report, Console(file=printed, width=160))
    for cell in [*HEADER[:num_columns], *(cell for cells in ROWS.values() for cell in cells[: num_columns - 1])]:
        assert cell in printed.getvalue()
    assert ("whole-step" in printed.getvalue()) == bool(beside)
    narrow = io.StringIO()
    print_table(report, Console(file=narrow, width=40))
    assert "…" not in narrow.getvalue()


@pytest.mark.parametrize(("harvest", "beside", "is_told"), [(0.75, 0.9, False), (1.83, 0.9, True), (0.75, 4.06, True)])
def test_training_that_was_faster_beside_requests_than_alone_is_said_to_tell_nothing(
    tmp_path: Path, harvest: float, beside: float, is_told: bool
) -> None:
    report = measured("whole-step")
    report["finetune"]["harvest"], report["beside"]["finetune"]["harvest"] = harvest, beside
    printed = io.StringIO()
    print_table(report, Console(file=printed, width=240))
    write_html(tmp_path / "report.html", report, ALONE, CORUN, [(1, 5.5)], BESIDE)
    for text in (printed.getvalue(), (tmp_path / "report.html").read_text()):
        assert ("Training cannot be faster beside requests than alone" in text) == is_told


def test_where_no_request_came_nothing_stands(tmp_path: Path) -> None:
    report = measured()
    report["online"]["corun"] = summarize([], TARGETS, 5.0)
    rows = {name: cells for name, *cells in table_rows(report)}
    assert rows["TTFT (target 40 ms) p50 / p99, ms"] == ["10.0 / 10.0", "- / -"]
    assert rows["SLO attainment"] == ["100.0%", "-"]
    write_html(tmp_path / "report.html", report, ALONE, [], [(1, 5.5)])
    assert not re.search(r"\bnan\b", (tmp_path / "report.html").read_text(), re.IGNORECASE)
    write_json(tmp_path / "report.json", report)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    written = json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse)
    assert written["online"]["corun"]["ttft_ms"] == dict.fromkeys(("p50", "p90", "p99", "mean"))
    assert written["online"]["corun"]["slo_attainment"] is None
    assert written["online"]["alone"] == report["online"]["alone"]


@pytest.mark.parametrize(("beside", "results"), [("", ()), ("whole-step", BESIDE)])
def test_the_page_shows_the_second_policy_in_its_table_and_distributions(
    tmp_path: Path, beside: str, results: Sequence[RequestResult]
) -> None:
    path = tmp_path / "report.html"
    write_html(path, measured(beside), ALONE, CORUN, [(1, 5.5), (2, 0.25)], results)
    page = ElementTree.fromstring(path.read_text().partition("\n")[2])
    header = HEADER if beside else HEADER[:3]
    assert [cell.text or "" for cell in page.iter("th")] == header
    assert [len(row.findall("td")) for row in page.iter("tr")][1:] == [len(header)] * len(ROWS)
    lines = {figure.findtext("figcaption"): len(list(figure.iter("polyline"))) for figure in page.iter("figure")}
    assert lines["Time to first token"] == lines["Time per output token"] == len(header) - 1
    assert ("policy whole-step" in path.read_text()) == bool(beside)


@pytest.mark.parametrize(
    ("num_steps", "finish_s", "expected"),
    [(150, 1010.0, 10.0), (150, 990.0, 0.0), (150, None, None), (100_000, 9e3, None)],
)
def test_a_job_that_is_cancelled_has_no_time_to_go(
    num_steps: int, finish_s: float | None, expected: float | None
) -> None:
    settings = {"max_steps": num_steps}
    method = {"type": "supervised", "supervised": {"hyperparameters": settings}}
    assert seconds_to_go({"method": method, "estimated_finish": finish_s}, 1000.0) == expected
