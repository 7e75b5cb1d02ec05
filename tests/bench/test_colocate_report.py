"""The page of `cotenant bench colocate`, from figures made up here."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from cotenant.bench.board_power import power_table
from cotenant.bench.colocate_report import report_page
from cotenant.bench.colocate_text import comparison_lines, table_row
from cotenant.bench.comparison import compare
from cotenant.bench.device_losses import loss_rows

HOSTILE = 'a <script>alert("&")</script> trace'
POLICIES = ("adaptive", "inference-only", "static", "someone's own & new")


def timeline() -> dict[str, Any]:
    return {
        "interval_s": 0.5,
        "seconds": [0.5, 1.0, 1.5],
        "step_ms": [8.0, None, 12.0],
        "longest_step_ms": [9.0, None, 13.0],
        "mode": ["temporal", "none", "spatial"],
        "online_share": [0.2, 0.0, 0.5],
        "fused_share": [0.0, 0.0, 0.1],
        "best_effort_share": [0.7, 1.0, 0.4],
        "trained_tokens": [100.0, 300.0, 350.0],
    }


def cell(policy: str, scale: float, tpot_ms: float) -> dict[str, Any]:
    values = [1.0 + share / 10 for share in range(101)]
    latency = {"p50": 6.0, "p90": 10.0, "p99": None, "mean": 6.0}
    return {
        "load": "trace",
        "trace": HOSTILE,
        "format": "azure",
        "time_scale": scale,
        "request_rate": 4.0 * scale,
        "policy": policy,
        "slo": {"ttft_ms": 500.0, "tpot_ms": tpot_ms},
        "duration_s": 1.5,
        "num_requests": 60,
        "attainment": 0.5 if policy == "static" else 1.0,
        "ttft_ms": latency,
        "tpot_ms": latency,
        "itl_ms": {**latency, "p99": 11.0},
        "cdf": {"ttft_ms": values, "tpot_ms": values, "itl_ms": values},
        "train_tokens_per_s": 0.0 if policy == "inference-only" else 50.0 * tpot_ms,
        "harvest": 0.0 if policy == "inference-only" else 50.0 * tpot_ms / 4000.0,
        "utilisation": {
            "sm": 0.9,
            "memory": 0.4,
            "sm_clock_mhz": 1800.5 if policy == "inference-only" else 1440.4,
            "power_w": 698.6,
            "power_limited": 0.956,
            "power_limit_w": 700.0,
        },
        "device_time": {
            "prompts_alone": 0.15 if policy == "inference-only" else 0.2,
            "prompts_shared": 0.0,
            "decode_alone": 0.05,
            "decode_shared": 0.3,
            "training_alone": 0.4,
            "rest": 0.05,
            "training_work": 0.375,
            "decode_steps_per_s": 50.0,
            "decode_step_ms": 4.0 if policy == "inference-only" else 6.0,
        },
        "timeline": timeline(),
    }


@pytest.fixture
def report() -> dict[str, Any]:
    cells = [cell(policy, scale, tpot) for scale in (0.5, 1.0) for tpot in (10.0, 40.0) for policy in POLICIES]
    return {
        "kind": "colocate",
        "label": "<label>",
        "model": "m<o>del",
        "dtype": "bfloat16",
        "device": "gpu",
        "num_sms": 132,
        "training": {"seq_len": 2048, "tokens_per_step": 4096, "tasklet_tokens": 0, "r": 16},
        "machine": {"cpu": "A & B", "num_cores": 4, "gpus": ["<GPU>"]},
        "versions": {"torch": "2.13.0", "cotenant": None},
        "command": f"cotenant bench colocate --trace '{HOSTILE}'",
        "train_alone_tokens_per_s": 4000.0,
        "cells": cells,
    }


def written(path: Path, report: dict[str, Any]) -> ElementTree.Element:
    path.write_text(report_page({**report, "comparison": compare(report, 0.99)}), encoding="utf-8")
    return ElementTree.fromstring(path.read_text(encoding="utf-8"))


def captions(root: ElementTree.Element) -> list[str]:
    return [caption.text or "" for caption in root.iter("figcaption")]


def test_the_page_has_every_policy_and_every_chart_and_nothing_from_elsewhere(
    tmp_path: Path, report: dict[str, Any]
) -> None:
    root = written(tmp_path / "report.html", report)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not list(root.iter("script"))
    assert not re.search(r"(src|href)=|url\(|@import", text)
    names = captions(root)
    expected = [f"{HOSTILE} x {scale}: training against the target" for scale in ("0.5", "1")]
    expected += [f"{HOSTILE} at {tpot} ms: training against the load" for tpot in (10, 40)]
    expected += [f"{policy}: who has the device" for policy in POLICIES]
    expected += [f"{policy}: steps of the batch" for policy in POLICIES]
    expected += [
        f"{latency}, {HOSTILE} x {scale} at {tpot} ms"
        for scale in ("0.5", "1")
        for tpot in (10, 40)
        for latency in ("Time to first token", "Time per output token")
    ]
    assert sorted(names) == sorted(expected)
    for figure in root.iter("figure"):
        caption = captions(figure)[0]
        legend = {span.find("svg").tail for span in figure.iter("span")}  # type: ignore[union-attr]
        if "against" in caption or "Time" in caption:
            assert legend == set(POLICIES)


def test_what_the_board_draws_is_told_of_training_alone_and_of_each_place(
    tmp_path: Path, report: dict[str, Any]
) -> None:
    alone = {**report["cells"][0]["utilisation"], "power_w": 701.2, "sm_clock_mhz": 1512.0}
    header, rows = power_table({**report, "train_alone_utilisation": alone})
    assert rows[0] == ["training alone", "-", "701", "700", "96%", "1,512"]
    assert [row[1] for row in rows[1:]] == ["adaptive", "inference-only"] * 4
    clocks = {"adaptive": "1,440", "inference-only": "1,800"}
    assert all(row[2:] == ["699", "700", "96%", clocks[row[1]]] for row in rows[1:])
    assert power_table({**report, "train_alone_utilisation": alone, "runs": [{}, {}]}) == (header, rows[1:])
    text = "".join(written(tmp_path / "report.html", report).itertext())
    assert "What the board draws" in text
    for one in report["cells"]:  # as earlier versions wrote it
        one["utilisation"] = {"sm": 0.9, "memory": 0.4}
    assert power_table(report)[1] == []


def test_what_a_gpu_counts_of_its_sms_and_bandwidth_is_told_where_it_does(
    tmp_path: Path, report: dict[str, Any]
) -> None:
    report["cells"][0]["utilisation"] |= {"busy_sms": 0.754, "bandwidth": 0.331}
    header, rows = power_table(report)
    assert list(header[-2:]) == ["SMs busy", "bandwidth used"]
    counted = [row for row in rows if row[-2:] != ["-", "-"]]
    assert [(row[1], *row[-2:]) for row in counted] == [(report["cells"][0]["policy"], "75%", "33%")]
    assert "75%" in "".join(written(tmp_path / "report.html", report).itertext())


@pytest.mark.parametrize("measured", [None, {}, {"sm": 0.9}])
def test_columns_of_what_no_cell_has_are_left_out(
    measured: dict[str, float] | None, tmp_path: Path, report: dict[str, Any]
) -> None:
    """A CPU has none of them."""
    for one in report["cells"]:
        one["utilisation"] = None
    report["cells"][0]["utilisation"] = measured
    root = written(tmp_path / "report.html", report)
    header = [heading.text for heading in list(root.iter("table"))[-1].iter("th")]
    assert header[-2:] == (["requests", "GPU busy"] if measured else [header[-2], "requests"])


def test_a_grid_of_several_runs_names_them(tmp_path: Path, report: dict[str, Any]) -> None:
    runs = [{"command": f"bench part {number}", "train_alone_tokens_per_s": 1000.0 + number} for number in (1, 2, 1)]
    root = written(tmp_path / "page.html", {**report, "runs": runs})
    text = " ".join(root.itertext())
    assert "1,001, 1,002, 1,001 tokens/s with the device to itself, measured in the same run each" in text
    assert text.count("bench part 1") == 1 == text.count("bench part 2")
    assert report["command"] not in text


def test_a_policy_has_one_colour_in_every_chart(tmp_path: Path, report: dict[str, Any]) -> None:
    root = written(tmp_path / "report.html", report)
    looks: dict[str, set[tuple[str, str | None]]] = {}
    for figure in root.iter("figure"):
        for span in figure.iter("span"):
            key = span.find("svg")
            assert key is not None
            line = key.find("line")
            if line is not None and key.tail in POLICIES:
                looks.setdefault(str(key.tail), set()).add((line.attrib["stroke"], line.get("stroke-dasharray")))
    assert set(looks) == set(POLICIES)
    assert all(len(each) == 1 for each in looks.values())
    assert len(set.union(*looks.values())) == len(POLICIES)


def test_a_missed_slo_is_hollow(tmp_path: Path, report: dict[str, Any]) -> None:
    root = written(tmp_path / "report.html", report)
    (chart,) = (
        figure for figure in root.iter("figure") if captions(figure)[0].endswith("x 1: training against the target")
    )
    assert len([mark for mark in chart.iter() if mark.get("class") == "hollow"]) == 2, "static, at both targets"


def test_what_was_not_measured_is_left_out(tmp_path: Path, report: dict[str, Any]) -> None:
    old = copy.deepcopy(report)
    del old["num_sms"]
    for one in old["cells"]:
        for name in ("cdf", "timeline", "utilisation", "request_rate", "trace", "device_time"):
            del one[name]
        one.update(attainment=None, num_requests=0, ttft_ms=None, tpot_ms=None, itl_ms=None)
    root = written(tmp_path / "report.html", old)
    assert not [name for name in captions(root) if "device" in name or "Time" in name]
    text = "".join(root.itertext())
    assert "Where the device's time goes" not in text
    assert "What the board draws" not in text
    assert table_row(old["cells"][0])[5:] == ["-"] * 4
    assert written(tmp_path / "empty.html", {**report, "cells": []}) is not None


def test_a_p99_that_cannot_be_stated_is_a_dash(report: dict[str, Any]) -> None:
    assert table_row(report["cells"][0])[-3:] == ["6.0/-", "6.0/-", "6.0/11.0"]


def test_what_the_comparison_says(report: dict[str, Any]) -> None:
    lines = comparison_lines(compare(report, 0.99))
    assert any("against the best other policy, someone's own & new: 1.00 times" in line for line in lines)
    assert any("against static: no ratio, that one is 0" in line for line in lines)
    assert any("meets: none." in line for line in lines)
    (at_one,) = (line for line in lines if "at 1 times its rate" in line)
    assert "0.62 times the training throughput (0.25 to 1.00)" in at_one


def test_where_the_time_went_and_what_is_the_most_to_be_had(tmp_path: Path, report: dict[str, Any]) -> None:
    root = written(tmp_path / "report.html", report)
    rows = [[cell.text for cell in row] for row in root.iter("tr")]
    (adaptive,) = (row for row in rows if row[:2] == [f"{HOSTILE} x 1 at 40 ms", "adaptive"] and len(row) == 12)
    assert adaptive[2:8] == ["50.0%", "20.0%", "5.0%", "17.5%", "2.5%", "5.0%"]
    assert adaptive[8:] == ["85.0%", "18.7%", "4.5", "4.0"], "22.5% of the time for 50 steps a second"
    assert not [row for row in rows if row[1] == "inference-only" and len(row) == 12], "it trains nothing"
    without = [one for one in report["cells"] if one["policy"] != "inference-only"]
    assert {(*row[-4:-2], row[-1]) for _, row in loss_rows(without)} == {("-", "-", "-")}


def test_what_a_step_costs_is_not_told_where_prompts_are_shared_too(report: dict[str, Any]) -> None:
    shared = copy.deepcopy(report["cells"])
    for one in shared:
        one["device_time"] |= {"prompts_alone": 0.0, "prompts_shared": 0.2}
    assert {row[-2] for _, row in loss_rows(report["cells"])} != {"-"}
    assert {row[-2] for _, row in loss_rows(shared)} == {"-"}
