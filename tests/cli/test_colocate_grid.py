"""In which order the cells of a grid are measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cotenant.bench.colocate_text import table_row
from cotenant.cli.colocate_grid import Grid
from cotenant.cli.colocate_loads import ColocateLoad
from cotenant.core.plan import Slo
from cotenant.runtime.colocate_cell import Cell

POLICIES = ("inference-only", "adaptive", "llmstation", "harli", "static")


Run = tuple[int, float, str]


def load(batch_size: int, runs: list[Run], attained: int = 1) -> ColocateLoad:
    """One that notes what is measured: in the n-th run training has n tokens/s."""

    def measure(policy: str, slo: Slo) -> Cell:
        runs.append((batch_size, slo.tpot_ms, policy))
        return Cell(policy, slo, 1.0, 1, 0, attained, [1.0], [1.0], [1.0], 1.0, train_tokens_per_s=float(len(runs)))

    parameters = {"load": "steady", "batch_size": batch_size, "context": 100, "num_tokens": 10}
    return ColocateLoad(parameters, measure)


def empty_report() -> dict[str, Any]:
    return {"train_alone_tokens_per_s": 100.0, "slo_attainment": 0.99, "cells": []}


def test_what_is_missing_is_measured_place_by_place() -> None:
    runs: list[Run] = []
    loads, slos, report = [load(8, runs), load(32, runs)], [Slo(500.0, 10.0), Slo(500.0, 40.0)], empty_report()
    grid = Grid([each.parameters for each in loads], slos, POLICIES, skip_hopeless=False)
    grid.measure(report, loads, None)
    assert runs == [(size, slo.tpot_ms, policy) for size in (8, 32) for slo in slos for policy in POLICIES]
    assert [cell["train_tokens_per_s"] for cell in report["cells"]] == list(range(1, len(runs) + 1))
    del report["cells"][3]
    grid.measure(report, loads, None)
    assert runs[-1] == (8, 10.0, POLICIES[3])
    assert len(runs) == len(report["cells"]) + 1, "nothing else was missing"


def test_what_is_printed_names_the_part_where_the_file_has_others(capsys: pytest.CaptureFixture[str]) -> None:
    """As with --resume, after a run with another --slo-ttft-ms."""
    runs: list[Run] = []
    report, loads = empty_report(), [load(8, runs)]
    for ttft_ms in (500.0, 250.0):
        Grid([loads[0].parameters], [Slo(ttft_ms, 10.0)], ("static",), skip_hopeless=False).measure(report, loads, None)
    cells = [text.partition(", TPOT")[0] for text in capsys.readouterr().out.splitlines() if "TPOT" in text]
    assert cells == ["8 x 100", "8 x 100 (TTFT 250 ms)"]


def said_of(capsys: pytest.CaptureFixture[str], skip_hopeless: bool, attained: int, rounds: int = 1) -> list[str]:
    runs: list[Run] = []
    loads = [load(8, runs, attained), load(32, runs, attained)]
    policies = ("inference-only", "adaptive")
    grid = Grid([each.parameters for each in loads], [Slo(500.0, 10.0)], policies, skip_hopeless, rounds)
    grid.measure(empty_report(), loads, None)
    return capsys.readouterr().err.splitlines()


def test_what_is_measured_says_which_of_how_many_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    first, third = "1 of 4: 8 x 100 at 10 ms, inference-only", "3 of 4: 32 x 100 at 10 ms, inference-only"
    second, fourth = "2 of 4: 8 x 100 at 10 ms, adaptive", "4 of 4: 32 x 100 at 10 ms, adaptive"
    every = [f"measuring cell {text}" for text in (first, second, third, fourth)]
    assert said_of(capsys, skip_hopeless=False, attained=0) == every
    assert said_of(capsys, skip_hopeless=True, attained=1) == every
    left_out = "serving alone misses the SLO there, so nothing else is measured"
    told = [every[0], left_out, every[2], left_out]
    assert said_of(capsys, skip_hopeless=True, attained=0) == told, "who is needless counts as measured"
    assert said_of(capsys, skip_hopeless=False, attained=1, rounds=3) == [
        "measuring cells 1 to 2 of 4: 8 x 100 at 10 ms, inference-only, adaptive",
        "measuring cells 3 to 4 of 4: 32 x 100 at 10 ms, inference-only, adaptive",
    ]


@pytest.mark.parametrize("attained", [0, 1])
def test_rounds_go_back_and_forth_and_a_cell_is_all_of_them(attained: int, tmp_path: Path) -> None:
    runs: list[Run] = []
    loads, report, path = [load(8, runs, attained), load(32, runs, attained)], empty_report(), tmp_path / "f.json"
    policies = ("inference-only", "adaptive", "llmstation")
    grid = Grid([each.parameters for each in loads], [Slo(500.0, 10.0)], policies, skip_hopeless=True, rounds=3)
    grid.measure(report, loads, path)
    order = ["inference-only"] * 3
    if attained:  # else the others have nothing to meet
        order += ["adaptive", "llmstation", "llmstation", "adaptive", "adaptive", "llmstation"]
    assert [policy for size, _, policy in runs if size == 8] == order
    assert [size for size, _, _ in runs] == [8] * len(order) + [32] * len(order)
    cells = report["cells"][: len(report["cells"]) // 2]
    assert [cell["policy"] for cell in cells] == list(policies)[: None if attained else 1]
    assert [cell["num_requests"] for cell in cells] == [3] * len(cells)
    assert cells[0]["harvest_of_runs"] == [0.01, 0.02, 0.03]
    assert table_row(cells[0])[4] == "2.0% (1.0% to 3.0%)"
    if attained:
        assert cells[1]["harvest_of_runs"] == [0.04, 0.07, 0.08]
        assert cells[1]["harvest"] == pytest.approx(0.19 / 3, abs=1e-4)
    assert cells[0]["attainment_of_runs"] == [float(attained)] * 3
    assert table_row(cells[0])[5] == f"{attained:.1%}"
    assert json.loads(path.read_text())["cells"] == report["cells"]
    assert not grid.missing(report)


def test_a_bad_round_is_seen_beside_good_ones() -> None:
    runs: list[Run] = []
    good, bad = load(8, runs).measure, load(8, runs, attained=0).measure

    def measure(policy: str, slo: Slo) -> Cell:
        return (bad if len(runs) == 1 else good)(policy, slo)

    parameters, report = load(8, runs).parameters, empty_report()
    grid = Grid([parameters], [Slo(500.0, 10.0)], ("inference-only",), skip_hopeless=False, rounds=3)
    grid.measure(report, [ColocateLoad(parameters, measure)], None)
    (cell,) = report["cells"]
    assert cell["attainment_of_runs"] == [1.0, 0.0, 1.0]
    assert table_row(cell)[5] == "66.7% (0.0% to 100.0%)"
