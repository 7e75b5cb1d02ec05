"""Which policy was best where, and on average."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.bench.colocate_text import comparison_lines, load_name, with_parts
from cotenant.bench.comparison import compare

ALONE = 100.0


def cell(
    policy: str,
    tokens_per_s: float,
    attainment: float | None = 1.0,
    *,
    scale: float = 1.0,
    tpot_ms: float = 10.0,
    num_requests: int = 200,
) -> dict[str, Any]:
    return {
        "load": "trace",
        "trace": "conv",
        "format": "azure",
        "time_scale": scale,
        "slo": {"ttft_ms": 500.0, "tpot_ms": tpot_ms},
        "policy": policy,
        "train_tokens_per_s": tokens_per_s,
        "harvest": tokens_per_s / ALONE,
        "attainment": attainment,
        "num_requests": num_requests,
    }


def compared(*cells: dict[str, Any], attainment: float = 0.99) -> dict[str, Any]:
    comparison = compare({"cells": cells, "train_alone_tokens_per_s": ALONE}, attainment)
    json.dumps(comparison, allow_nan=False)
    return comparison


def test_what_was_measured_in_one_run_is_what_counts() -> None:
    """However a harvest is rounded; of several runs each has a speed alone of its own."""
    measured = {**cell("adaptive", 33.333), "harvest": 0.3333}
    report: dict[str, Any] = {"cells": [measured], "train_alone_tokens_per_s": ALONE}
    comparison = compare(report, 0.99)
    assert comparison["averages"] == {"adaptive": 33.33}
    assert comparison["places"][0]["policies"]["adaptive"]["train_tokens_per_s"] == 33.333
    assert not any("put together" in line for line in comparison_lines(comparison))
    report["runs"] = [{"train_alone_tokens_per_s": alone} for alone in (90.0, 110.0)]
    faster = {**cell("harli", 33.0), "harvest": 0.30}
    comparison = compare({**report, "cells": [measured, faster]}, 0.99)
    assert comparison["averages"] == {"adaptive": 33.33, "harli": 30.0}
    (said,) = [line for line in comparison_lines(comparison) if "put together" in line]
    assert "came to 90, 110 tokens/s" in said
    assert "their mean, 100, in each" in said


def test_a_missed_slo_counts_as_nothing() -> None:
    comparison = compared(
        cell("adaptive", 60.0),
        cell("harli", 80.0, 0.98),
        cell("static", 40.0),
        cell("inference-only", 0.0),
        cell("adaptive", 50.0, tpot_ms=40.0),
        cell("harli", 80.0, tpot_ms=40.0),
        cell("static", 0.0, tpot_ms=40.0),
        cell("inference-only", 0.0, tpot_ms=40.0),
    )
    assert comparison["averages"] == {"adaptive": 55.0, "harli": 40.0, "static": 20.0, "inference-only": 0.0}
    ratios = comparison["ratios"]
    assert ratios["best_other"] == {"policy": "harli", "ratio": 1.375}
    assert ratios["static"] == {"policy": "static", "ratio": 2.75}
    assert ratios["chunked"] == {"policy": None, "ratio": None}
    first, second = comparison["places"]
    assert (first["best_other"], first["ratio_to_best_other"]) == ("static", 1.5)
    assert (second["best_other"], second["ratio_to_best_other"]) == ("harli", 0.625)
    assert [place["slo"]["tpot_ms"] for place in comparison["behind"]] == [40.0]
    assert comparison["misses"] == []


@pytest.mark.parametrize(("tokens_per_s", "is_behind"), [(97.0, False), (96.9, True), (100.0, False), (120.0, False)])
def test_three_percent_behind_is_as_good(tokens_per_s: float, is_behind: bool) -> None:
    comparison = compared(cell("adaptive", tokens_per_s), cell("harli", 100.0))
    assert bool(comparison["behind"]) == is_behind


def test_a_cell_of_a_faster_gpu_counts_for_no_more() -> None:
    """Of a report that was put together: each run has its own speed alone. Another library's cells say theirs."""
    faster = {**cell("harli", 110.0), "harvest": 1.0}
    assert compared(cell("adaptive", 100.0), faster)["places"][0]["ratio_to_best_other"] == 1.0
    library = {**cell("mps", 80.0), "harvest": 1.0, "train_alone_tokens_per_s": 80.0}
    assert compared(cell("adaptive", 100.0), library)["places"][0]["ratio_to_best_other"] == 1.25


def test_a_miss_is_what_serving_alone_would_have_met() -> None:
    both = compared(cell("adaptive", 50.0, 0.5), cell("inference-only", 0.0, 0.5))
    assert both["misses"] == []
    ours = compared(cell("adaptive", 50.0, 0.5), cell("inference-only", 0.0, 1.0))
    assert [place["trace"] for place in ours["misses"]] == ["conv"]
    assert ours["behind"] == [], "nobody trained and met the SLO"
    assert compared(cell("adaptive", 50.0, 0.5), attainment=0.5)["places"][0]["policies"]["adaptive"]["meets_slo"]


def test_without_requests_or_without_adaptive_there_is_less_to_say() -> None:
    empty = compared(cell("adaptive", 50.0, None, num_requests=0), cell("static", 40.0, None, num_requests=0))
    assert (empty["places"], empty["averages"]) == ([], {"adaptive": None, "static": None})
    assert empty["ratios"] == {}
    others = compared(cell("static", 40.0), cell("temporal", 10.0))
    assert (others["ratios"], others["misses"], others["behind"], others["two_gpus"]) == ({}, [], [], [])
    assert others["places"][0]["best_other"] == "static"
    assert compared()["places"] == []
    alone = compared(cell("adaptive", 40.0))
    assert alone["ratios"]["best_other"] == {"policy": None, "ratio": None}


def test_nothing_is_claimed_of_what_was_not_measured() -> None:
    alone = "\n".join(comparison_lines(compared(cell("adaptive", 60.0))))
    assert "misses an SLO" not in alone
    assert "behind the best other" not in alone
    with_reference = "\n".join(comparison_lines(compared(cell("adaptive", 60.0), cell("inference-only", 0.0))))
    assert "Places where adaptive misses an SLO that inference-only meets: none." in with_reference
    assert "behind the best other" not in with_reference
    with_other = "\n".join(comparison_lines(compared(cell("adaptive", 60.0), cell("harli", 50.0))))
    assert "misses an SLO" not in with_other
    assert "Places where adaptive is more than 3% behind the best other: none." in with_other


def test_a_run_that_was_cut_off_averages_over_whole_places() -> None:
    comparison = compared(cell("adaptive", 60.0), cell("static", 40.0), cell("adaptive", 10.0, tpot_ms=40.0))
    assert comparison["averages"] == {"adaptive": 60.0, "static": 40.0}
    assert (comparison["num_whole_places"], len(comparison["places"])) == (1, 2)


def test_serving_alone_need_not_be_measured_everywhere() -> None:
    comparison = compared(
        cell("adaptive", 60.0),
        cell("static", 40.0),
        cell("inference-only", 0.0, tpot_ms=40.0),
        cell("adaptive", 80.0, tpot_ms=40.0),
        cell("static", 50.0, tpot_ms=40.0),
        cell("inference-only", 0.0, 0.5, scale=4.0),
    )
    assert comparison["averages"] == {"adaptive": 70.0, "static": 45.0, "inference-only": 0.0}
    assert (comparison["num_whole_places"], len(comparison["places"])) == (2, 3)


def test_two_gpus_that_share_half_the_load_each() -> None:
    comparison = compared(
        cell("adaptive", 75.0, scale=0.5),
        cell("inference-only", 0.0, scale=0.5),
        cell("adaptive", 60.0, 0.9, scale=1.0),
        cell("inference-only", 0.0, 0.98, scale=1.0),
    )
    at_one, at_two = comparison["two_gpus"]
    assert (at_one["time_scale"], at_one["ratio"], at_one["separate_meets_slo"]) == (1.0, 1.5, False)
    assert (at_two["time_scale"], at_two["ratio"], at_two["separate_meets_slo"]) == (2.0, 0.0, None)


def test_two_gpus_as_measured_are_no_rival_on_one() -> None:
    comparison = compared(
        cell("adaptive", 75.0, scale=0.5),
        cell("separate", 120.0, scale=0.5),
        cell("mps-60", 50.0, scale=0.5),
        cell("adaptive", 60.0),
        cell("inference-only", 0.0, 0.98),
        cell("separate", 120.0),
    )
    assert [place["best_other"] for place in comparison["places"]] == ["mps-60", None]
    assert comparison["behind"] == []
    two = comparison["two_gpus"][0]
    assert (two["time_scale"], two["separate_tokens_per_s"], two["ratio"]) == (1.0, 120.0, 1.25)
    assert two["separate_meets_slo"], "its server does, if not the one in one process"
    only = compared(cell("adaptive", 75.0), cell("separate", 120.0), cell("mps-60", 50.0))
    assert only["ratios"]["best_other"] == {"policy": "mps-60", "ratio": 1.5}


def test_parts_of_a_trace_are_places_of_their_own() -> None:
    """As JSON has their windows, or as they were measured."""
    early, late = {"window_s": [0.0, 60.0]}, {"window_s": (600.0, 660.0)}
    cells = [cell("adaptive", 60.0) | early, cell("static", 50.0) | late]
    cells += [cell("adaptive", 40.0) | late, cell("static", 30.0) | {"window_s": (0.0, 60.0)}]
    comparison = compared(*cells)
    assert [place["ratio_to_best_other"] for place in comparison["places"]] == [2.0, 0.8]
    assert comparison["behind"] == [comparison["places"][1]["place"]]
    told = compared(*with_parts(cells))
    assert any("behind the best other: conv (from 600 s) x 1 at 10 ms." in line for line in comparison_lines(told))
    longer = with_parts([cell("static", 30.0) | {"window_s": [0.0, 90.0]}, *cells])
    assert [load_name(each) for each in longer[:3]] == [
        "conv (0 to 90 s) x 1",
        "conv (0 to 60 s) x 1",
        "conv (from 600 s) x 1",
    ]
    seconds = [cell("static", 30.0, scale=scale) | {"window_s": [6.0, 6.0 + 12 * scale]} for scale in (1.0, 2.0)]
    assert [load_name(each) for each in with_parts(seconds)] == ["conv x 1", "conv x 2"], "of --cell-seconds"


def test_targets_for_ttft_are_places_of_their_own_and_named() -> None:
    def at(ttft_ms: float, policy: str, speed: float) -> dict[str, Any]:
        return cell(policy, speed) | {"slo": {"ttft_ms": ttft_ms, "tpot_ms": 10.0}}

    cells = [at(500.0, "adaptive", 60.0), at(500.0, "static", 50.0), at(250.5, "adaptive", 30.0)]
    cells.append(at(250.5, "static", 50.0))
    named = with_parts(cells)
    assert [load_name(each) for each in named[1:3]] == ["conv (TTFT 500 ms) x 1", "conv (TTFT 250.5 ms) x 1"]
    lines = comparison_lines(compared(*named))
    assert any("behind the best other: conv (TTFT 250.5 ms) x 1 at 10 ms." in line for line in lines)
    steady = {"load": "steady", "batch_size": 32, "context": 1024}
    assert load_name(with_parts([cells[2] | steady, *cells])[0]) == "32 x 1024 (TTFT 250.5 ms)"
    both = with_parts([*cells, cells[0] | {"window_s": (600.0, 660.0)}])
    assert load_name(both[4]) == "conv (from 600 s, TTFT 500 ms) x 1"
    assert [load_name(each) for each in with_parts(named[:2])] == ["conv x 1"] * 2


def test_two_gpus_share_one_part_of_a_trace() -> None:
    def part(policy: str, speed: float, scale: float, *window: float) -> dict[str, Any]:
        return cell(policy, speed, 0.98 if policy == "inference-only" else 1.0, scale=scale) | {"window_s": window}

    whole = [part("separate", 120.0, 2.0, 600.0, 660.0), part("inference-only", 0.0, 2.0, 0.0, 90.0)]
    whole.append(part("separate", 150.0, 2.0, 0.0, 60.0))
    halves = [part("adaptive", 75.0, 1.0, 0.0, 60.0), part("adaptive", 75.0, 1.0, 0.0, 30.0)]
    told = compared(*whole, *halves, part("adaptive", 60.0, 1.0, 30.0, 60.0))["two_gpus"]
    assert [(each["separate_tokens_per_s"], each["separate_meets_slo"]) for each in told] == [
        (150.0, True),
        (100.0, False),  # of --cell-seconds, which takes more at a higher rate
        (100.0, None),
    ]


@pytest.mark.parametrize(
    ("policy", "speed", "is_told"), [("static", 100.0, False), ("static", 104.0, True), ("separate", 120.0, False)]
)
def test_training_beside_requests_that_was_faster_than_alone_is_no_gain(
    policy: str, speed: float, is_told: bool
) -> None:
    lines = comparison_lines(compared(cell("adaptive", 60.0), cell(policy, speed)))
    assert [line.startswith("A harvest of 104.0% is no gain") for line in lines].count(True) == is_told


def test_errors_of_prediction_are_means_over_all_iterations() -> None:
    def errors(alone: float, count: int, **more: dict[str, float]) -> dict[str, Any]:
        return {"prediction_error": {"alone": {"mean": alone, "p95": 0.5, "iterations": count}, "co_run": None, **more}}

    comparison = compared(
        cell("inference-only", 0.0) | errors(0.01, 1000),
        cell("adaptive", 60.0) | errors(0.08, 10, co_run={"mean": 0.02, "p95": 0.5, "iterations": 300}),
        cell("harli", 60.0) | errors(0.5, 1000),
        cell("adaptive", 60.0, tpot_ms=40.0) | errors(0.02, 50) | {"attainment": 0.5},
        cell("adaptive", 60.0, tpot_ms=25.0),
    )
    assert comparison["prediction"] == {
        "inference-only": {"alone": {"mean": 0.01, "iterations": 1000}},
        "adaptive": {"alone": {"mean": 0.03, "iterations": 60}, "co_run": {"mean": 0.02, "iterations": 300}},
    }
    assert (
        "Mean error of prediction, over all iterations: inference-only alone 1.0% of 1000, adaptive alone 3.0% of 60, "
        "adaptive with training 2.0% of 300."
    ) in comparison_lines(comparison)
    known = {"mean": 0.01, "p95": 0.5, "share_above_10_percent": 0.02, "iterations": 100}
    comparison = compared(
        cell("adaptive", 60.0) | errors(0.01, 100, co_run=known),
        cell("adaptive", 60.0, tpot_ms=25.0) | errors(0.01, 100, co_run=known | {"share_above_10_percent": 0.08}),
    )
    assert comparison["prediction"]["adaptive"]["co_run"] == {
        "mean": 0.01,
        "share_above_10_percent": 0.05,
        "iterations": 200,
    }
    assert any("with training 1.0% of 200 (5.0% of them above 10%)." in line for line in comparison_lines(comparison))
    del comparison["prediction"]
    assert not any("prediction" in line for line in comparison_lines(comparison)), "of an earlier version"


_POLICIES = ("adaptive", "harli", "static", "inference-only")
_FIGURES = st.tuples(st.integers(0, 1000).map(float), st.sampled_from([None, 0.0, 0.5, 0.989, 0.99, 1.0]))


@given(
    st.dictionaries(st.tuples(st.sampled_from(_POLICIES), st.sampled_from([10.0, 25.0]), st.sampled_from([0.5, 1.0])),
                    _FIGURES, min_size=1)
)  # fmt: skip
def test_what_is_said_holds_for_any_grid(grid: dict[tuple[str, float, float], tuple[float, float | None]]) -> None:
    cells = [
        cell(policy, speed, attainment, scale=scale, tpot_ms=tpot_ms, num_requests=0 if attainment is None else 100)
        for (policy, tpot_ms, scale), (speed, attainment) in grid.items()
    ]
    comparison = compared(*cells)
    for place in comparison["places"]:
        policies = place["policies"]
        best = place["best_other"]
        speeds = {name: one["train_tokens_per_s"] for name, one in policies.items() if one["meets_slo"]}
        others = {name: speed for name, speed in speeds.items() if name != "adaptive"}
        assert (best is None) == (not others)
        if best is not None:
            assert others[best] == max(others.values())
        if "adaptive" in speeds and best is not None:
            assert (place["place"] in comparison["behind"]) == (speeds["adaptive"] < 0.97 * others[best])
            assert place["place"] not in comparison["misses"]
    for policy, average in comparison["averages"].items():
        most = max((one["train_tokens_per_s"] for one in cells if one["policy"] == policy), default=0.0)
        assert average is None or 0 <= average <= most
