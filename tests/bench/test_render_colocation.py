"""Results of co-location become the first page's tables, comparison and targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.rendering import ROOT, colocate_cell, colocated, device_time, render
from cotenant.bench.comparison import compare


def test_the_page_begins_with_what_a_job_gets_and_where_the_rest_is(tmp_path: Path) -> None:
    """Of places where serving alone is in time; a job that makes requests late has no speed to speak of."""
    results, target = tmp_path / "results", tmp_path / "page.md"
    results.mkdir()
    figures = {
        (1.0, 40.0): {
            "inference-only": (0.0, 1.0),
            "adaptive": (0.65, 1.0),
            "chunked": (0.6, 1.0),
            "static": (0.7, 0.5),
        },
        (1.0, 10.0): {"inference-only": (0.0, 1.0), "adaptive": (0.4, 0.95)},
        (4.0, 10.0): {"inference-only": (0.0, 0.5), "adaptive": (0.3, 1.0)},
    }
    cells = [
        colocate_cell(
            policy, *both, time_scale=scale, slo={"ttft_ms": 500.0, "tpot_ms": tpot_ms}, request_rate=5.26 * scale
        )
        for (scale, tpot_ms), policies in figures.items()
        for policy, both in policies.items()
    ]
    grid = colocated(cells)
    (results / "colocate_grid_h200.json").write_text(json.dumps(grid))
    (results / "colocate_a_gpu's.json").write_text(json.dumps(grid))
    assert render("--results", str(results), "--target", str(target)).returncode == 0
    short, _, rest = target.read_text().partition("## Contents")
    rows = [line for line in short.splitlines() if line.startswith("| conv")]
    latencies = "5.0 / - | 5.0 / - | 5.0 / 9.2 | 5.0 / 9.2"
    assert rows == [
        f"| conv x 1, 5.3 requests/s | 10 | 100.0% of 90 | 95.0% of 90 | {latencies} | 40.0%, too late | - |",
        f"| conv x 1, 5.3 requests/s | 40 | 100.0% of 90 | 100.0% of 90 | {latencies} | **65.0%** | `chunked` 60.0% |",
    ]
    assert "- [Colocate a gpu's](#colocate-a-gpus)" in rest
    assert "## Colocate a gpu's" in rest


def test_policies_beside_a_load_and_how_they_compare(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    result = colocated(
        [
            colocate_cell("inference-only", 0.0, 1.0, device_time=device_time(prompts=0.1), harvest_of_runs=[0.0]),
            colocate_cell("adaptive", 0.75, 1.0, device_time=device_time(prompts=0.15)),
            colocate_cell("static", 0.8, 0.5, device_time=device_time(prompts=0.15), harvest_of_runs=[0.82, 0.78, 0.8]),
            colocate_cell("temporal", 0.5, 1.0, device_time=device_time(prompts=0.12)),
            colocate_cell("idle", 0.9, None, num_requests=0, time_scale=2.0),
        ]
    )
    (results / "colocate.json").write_text(json.dumps(result))
    target = tmp_path / "page.md"
    assert render("--results", str(results), "--target", str(target)).returncode == 0
    page = target.read_text()
    row = "| conv trace, 0.5 x, 60 s | 40 | `adaptive` | **75.0%** | 100.0% of 90 | 5.0 / - | 5.0 / 9.2 | - | "
    assert row + "-, 2.1% (8.0%) |" in page
    row = "| conv trace, 0.5 x, 3 runs of 20 s | 40 | `static` | 80.0% (78.0% to 82.0%) | 50.0% of 90 |"
    assert row in page
    assert "| `idle` | 90.0% | - |" in page
    assert "| `inference-only` | 0.0% | 100.0% of 90 |" in page
    assert "| conv x 0.5 at 40 ms | `adaptive` | 75.0% | 15.0% | 2.0% | 5.0% | 0.0% | 3.0% | 90.0% |" in page
    assert "| conv x 0.5 at 40 ms | `temporal` | 50.0% | 12.0% |" in page, "the best other that meets the SLO"
    assert "| conv x 0.5 at 40 ms | `static` |" not in page
    assert "- Two GPUs under a trace at 1 times its rate, both with adaptive" in page


def _without_figures(result: Any) -> Any:
    """The same without what only an HTML report draws, which is most of it."""
    if isinstance(result, list):
        return [_without_figures(each) for each in result]
    if not isinstance(result, dict):
        return result
    return {name: _without_figures(value) for name, value in result.items() if name not in ("cdf", "timeline")}


def _place_of(cell: dict[str, Any]) -> tuple[str, float, float]:
    return cell["trace"], cell["time_scale"], cell["slo"]["tpot_ms"]


def test_what_was_aimed_at_is_met_or_missed_by_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from renderers import targets

    for kind in (
        "grid",
        "steady",
        "predicted",
        "again",
        "half",
        "rest",
        "code_half",
        "between",
        "own_rate",
        "two_gpus",
        "code_twice",
    ):
        name = f"colocate_{kind}_h200.json"
        (tmp_path / name).write_text(
            json.dumps(_without_figures(json.loads((ROOT / "bench" / "results" / name).read_text())))
        )
    grid = json.loads((tmp_path / "colocate_grid_h200.json").read_text())
    (ours,) = [cell for cell in grid["cells"] if (cell["policy"], _place_of(cell)) == ("adaptive", ("conv", 1.0, 40.0))]
    load = "conversation at its own rate, 40 ms"

    def aims() -> dict[str, list[str]]:
        grid["comparison"] = compare(grid, 0.99)
        (tmp_path / "colocate_grid_h200.json").write_text(json.dumps(grid))
        text = targets.section(tmp_path)[-1]
        rows = [[part.strip() for part in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
        return {f"{row[0]}: {row[1]}": row[2:] for row in rows}

    ours["harvest"] = 0.74
    measured, verdict, why = aims()[f"{load}: harvest 75%"]
    assert (measured, verdict) == ("74.0%", "**missed**")
    assert why
    ours["harvest"] = 0.75
    assert aims()[f"{load}: harvest 75%"] == ["75.0%", "met", ""]
    aim = f"{load}: TTFT p99 500 ms, TPOT p99 40 ms"
    ours["ttft_ms"]["p99"], ours["tpot_ms"]["p99"] = 500.0, 40.0
    assert aims()[aim] == ["TTFT p99 500 ms, TPOT p99 40.0 ms", "met", ""]
    ours["tpot_ms"]["p99"] = 40.1
    assert aims()[aim][:2] == ["TTFT p99 500 ms, TPOT p99 40.1 ms", "**missed**"]
    (in_time,) = [
        name for name in aims() if name.startswith("the grid, where serving alone is in time: in time at all")
    ]
    before = int(aims()[in_time][0])
    most = in_time.replace("in time at all", "at most 3% behind the best other in time, at all").replace(" places", "")
    assert aims()[most][:2] == [str(before), "met"]
    ours["attainment"] = 0.98
    assert aims()[in_time][:2] == [str(before - 1), "**missed**"]
    assert aims()[most][:2] == [str(before - 1), "**missed**"], "one that is late is behind for that alone"
    again = json.loads((tmp_path / "colocate_again_h200.json").read_text())
    late = [
        cell
        for cell in again["cells"]
        if cell["policy"] == "adaptive" and cell["attainment"] < 0.99 and cell["slo"]["tpot_ms"] > 10
    ]
    (in_time,) = [name for name in aims() if name.startswith("[the same again]") and "in time at all 19 places" in name]
    measured, verdict, why = aims()[in_time]
    assert (measured, verdict) == (str(19 - len(late)), "**missed**")
    assert "code x 2 at 15 ms (`adaptive` 95.0% in time, `harli` 96.0% in time" in why
    (by,) = [name for name in aims() if name.startswith("[the same again]") and "1.15 times" in name]
    before = float(aims()[by][0].partition(",")[0])
    for cell in late:
        cell["attainment"] = 0.99
    again["comparison"] = compare(again, 0.99)
    (tmp_path / "colocate_again_h200.json").write_text(json.dumps(again))
    assert aims()[in_time] == ["19", "met", ""]
    assert float(aims()[by][0].partition(",")[0]) > before, "one of the two places has all policies"
    twice = json.loads((tmp_path / "colocate_code_twice_h200.json").read_text())
    (there,) = [name for name in aims() if name.startswith("of these, code x 2 at 15 and 25 ms [by a later version]")]
    assert aims()[there] == ["2", "met", ""]
    (one,) = [c for c in twice["cells"] if (c["policy"], c["slo"]["tpot_ms"]) == ("adaptive", 15.0)]
    one["attainment"] = 0.98
    twice["comparison"] = compare(twice, 0.99)
    (tmp_path / "colocate_code_twice_h200.json").write_text(json.dumps(twice))
    assert aims()[there][:2] == ["1", "**missed**"]
    half = json.loads((tmp_path / "colocate_half_h200.json").read_text())
    name = "[these places by later versions](#on-a-gpu-half-of-the-grid-by-a-later-version), on three hosts"
    in_time = f"{name}: in time at all 24 places"
    assert aims()[in_time] == ["24", "met", ""]
    assert aims()[f"{name}: on average 1.38 times `chunked`"][1] == "met"
    assert aims()[f"{name}: on average 1.75 times `static`"][0].endswith(", of 15 places"), "which have it"
    (one,) = [cell for cell in half["cells"] if (cell["policy"], _place_of(cell)) == ("adaptive", ("conv", 1.0, 40.0))]
    one["attainment"] = 0.98
    (tmp_path / "colocate_half_h200.json").write_text(json.dumps(half))
    assert aims()[in_time][:2] == ["23", "**missed**"]

    between = json.loads((tmp_path / "colocate_between_h200.json").read_text())
    names = [name for name in aims() if "[beside training between requests]" in name and "on one more host: " in name]
    (in_time,) = [name for name in names if name.endswith("in time at all 24 places")]
    (two_gpus,) = [name for name in names if "two GPUs" in name]
    assert aims()[in_time] == ["24", "met", ""]
    assert aims()[two_gpus][:2] == ["1.495", "**missed**"]
    for cell in between["cells"]:
        if cell["policy"] == "adaptive":
            cell["harvest"] *= 1.01
    (one,) = [c for c in between["cells"] if (c["policy"], _place_of(c)) == ("adaptive", ("conv", 4.0, 40.0))]
    one["attainment"] = 0.98
    between["comparison"] = compare(between, 0.99)
    (tmp_path / "colocate_between_h200.json").write_text(json.dumps(between))
    assert aims()[in_time][:2] == ["23", "**missed**"]
    assert aims()[two_gpus][1] == "met"

    def of_errors(aim: str, whose: str = "by versions in turn") -> list[str]:
        (found,) = [
            row
            for name, row in aims().items()
            if name.startswith("errors of") and whose in name and name.endswith(f": {aim}")
        ]
        return found

    halves, whose = json.loads((tmp_path / "colocate_two_gpus_h200.json").read_text()), "at half the traces' rates"
    (two_gpus,) = [name for name in aims() if whose in name and "two GPUs that share" in name]
    assert aims()[two_gpus][:2] == ["1.540", "met"]
    assert of_errors("mean 3% alone", whose)[:2] == ["2.9% (in cells up to 3.8%)", "met"]
    aim = "p95 10% with training, in each cell"
    assert of_errors(aim, whose)[:2] == ["8 of 8 cells of 1034 batches or more, 8.2% at most", "met"]
    halves["cells"][0]["prediction_error"]["co_run"]["p95"] = 0.101
    (tmp_path / "colocate_two_gpus_h200.json").write_text(json.dumps(halves))
    told = ["7 of 8 cells of 1034 batches or more, 10.1% at most", "**missed**"]
    assert of_errors(aim, whose)[:2] == told

    own_rate = json.loads((tmp_path / "colocate_own_rate_h200.json").read_text())
    later = f"{load}, [by a later version](#on-a-gpu-the-conversation-at-its-own-rate)"
    measured, verdict, why = aims()[f"{later}: harvest 75%"]
    assert (measured, verdict) == ("69.5%, 68.0%, 67.6% from compressed weights", "**missed**")
    assert why.endswith("If decode steps cost nothing it would be 82.9% to 83.0%.")
    in_time = f"{later}: TTFT p99 500 ms, TPOT p99 40 ms"
    assert aims()[in_time][:2] == ["TTFT p99 172 ms, TPOT p99 38.2 ms at most", "met"]
    for cell in (cell for run in own_rate for cell in run["cells"] if cell["policy"] == "adaptive"):
        cell["harvest"] = 0.75
        if cell["slo"]["tpot_ms"] == 10:
            cell["tpot_ms"]["p99"] = 41.0
    (tmp_path / "colocate_own_rate_h200.json").write_text(json.dumps(own_rate))
    assert (aims()[f"{later}: harvest 75%"][1], aims()[in_time][1]) == ("met", "met")
    own_rate[0]["cells"][1]["tpot_ms"]["p99"] = 40.1
    (tmp_path / "colocate_own_rate_h200.json").write_text(json.dumps(own_rate))
    assert aims()[in_time][1] == "**missed**"

    aim = "p95 10% alone, in each cell"
    serving = [cell["prediction_error"]["alone"] for cell in grid["cells"] if cell["policy"] == "inference-only"]
    assert f"where nothing trains, in the grid, {len(serving)} of {len(serving)} cells of " in of_errors(aim)[0]
    serving[0]["p95"] = 0.2
    found = f"where nothing trains, in the grid, {len(serving) - 1} of {len(serving)} cells of "
    assert found in of_errors(aim)[0]
    assert of_errors(aim)[0].endswith(", 20.0% at most")
    predicted = json.loads((tmp_path / "colocate_predicted_h200.json").read_text())
    for cell in predicted["cells"]:
        cell["prediction_error"]["alone"]["p95"] = 0.1
    predicted["cells"][0]["prediction_error"]["alone"]["p95"] = 0.11
    (tmp_path / "colocate_predicted_h200.json").write_text(json.dumps(predicted))
    measured, _, why = of_errors(aim)
    assert measured.startswith("22 of 23 cells of 19 batches or more, 11.0% at most")
    of_runs = ((again, "10 of 19 cells of 21"), (half, "17 of 24 cells of 21"), (between, "20 of 24 cells of 19"))
    for run, num in of_runs:
        ours = [cell for cell in run["cells"] if cell["policy"] == "adaptive"]
        worst = max(cell["prediction_error"]["alone"]["p95"] for cell in ours)
        assert f"; {num} batches or more, {worst:.1%} at most; " in measured
    assert (
        " 194 are more than 10% off, 29 of them decode steps, where it was 78 of 123 in the grid again, whose " in why
    )
    assert " Of the 165 with prompts 85 have a chunk behind earlier ones of the same prompt and took longer" in why
    measured, verdict, why = of_errors("p95 10% with training, in each cell")
    assert (measured.endswith(", 10.5%, 8.2% at most"), verdict) == (True, "**missed**")
    assert (
        "Above it: conv x 4 at 40 ms, where 6.1% of the 164 batches with training are. Of its 10 worst 10 took" in why
    )
    measured, verdict, _ = of_errors("mean 3% alone")
    assert ", 3.1% (in cells up to 6.1%), 3.0% (in cells up to 6.3%), 3.1% (in cells up to 5.8%); " in measured
    assert verdict == "**missed**", "by one of them"
    aim = "p95 10%, of all batches (read so later): at most 5% above"
    later = ("half", "rest", "code_half")
    runs = (
        (("predicted",), ("conv", 4.0, 10.0)),
        (("again",), None),
        (later, ("code", 2.0, 10.0)),
        (("between",), None),
    )
    for index, (kinds, left_out) in enumerate(runs):  # one is enough for a target to be missed
        paths = [tmp_path / f"colocate_{kind}_h200.json" for kind in kinds]
        before = [path.read_text() for path in paths]
        for share, verdict in ((0.05, "met"), (0.051, "**missed**")):
            for path, text in zip(paths, before, strict=True):
                run = json.loads(text)
                for cell in (each for each in run["cells"] if each["policy"] == "adaptive"):
                    is_counted = _place_of(cell) != left_out
                    cell["prediction_error"]["alone"]["share_above_10_percent"] = share if is_counted else 1.0
                path.write_text(json.dumps(run))
            measured, found, _ = of_errors(aim)
            assert (measured.split(",")[index].split()[0], found) == (f"{share:.1%}", verdict)
        for path, text in zip(paths, before, strict=True):
            path.write_text(text)
    steady = json.loads((tmp_path / "colocate_steady_h200.json").read_text())
    ours = [
        cell for run in steady for cell in run["cells"] if (cell["policy"], cell["slo"]["tpot_ms"]) == ("adaptive", 40)
    ][-5:]
    aim = "32 sequences of about 1,024 tokens, TPOT 40 ms: harvest 88%"
    for harvests, attainments, verdict in (
        ((0.87, 0.889, 0.89, 0.89, 0.88), (1.0, 1.0, 1.0, 1.0, 1.0), "met"),
        ((0.87, 0.889, 0.89, 0.89, 0.879), (1.0, 1.0, 1.0, 1.0, 1.0), "**missed**"),
        ((0.87, 0.879, 0.889, 0.889, 0.89), (1.0, 0.0, 1.0, 1.0, 1.0), "met"),
        ((0.87, 0.889, 0.889, 0.889, 0.89), (1.0, 1.0, 1.0, 1.0, 0.0), "**missed**"),
    ):
        for cell, harvest, attainment in zip(ours, harvests, attainments, strict=True):
            cell |= {"harvest": harvest, "tpot_ms": {**cell["tpot_ms"], "mean": 39.0}, "attainment": attainment}
        (tmp_path / "colocate_steady_h200.json").write_text(json.dumps(steady))
        *before, newest = (f"{harvest:.1%}" for harvest in harvests)
        measured = f"{newest}, TPOT 39.0 ms, in one run; earlier ones on other cards {', '.join(before)}"
        assert aims()[aim][:2] == [measured, verdict]
    ours[-1] |= {"harvest": 0.8796, "attainment": 1.0}
    (tmp_path / "colocate_steady_h200.json").write_text(json.dumps(steady))
    measured, verdict, why = aims()[aim]
    assert (measured.split(",")[0], verdict) == ("87.96%", "**missed**")
    assert "W allow" in why
    ours[-1] |= {"harvest": 0.89, "attainment": 0.95}
    (tmp_path / "colocate_steady_h200.json").write_text(json.dumps(steady))
    assert aims()[aim][1:] == ["**missed**", "5% of the sequences that were timed were late."]
    ours[-1] |= {"harvest": 0.89, "tpot_ms": {**ours[-1]["tpot_ms"], "mean": 40.0004}, "attainment": 0.0}
    (tmp_path / "colocate_steady_h200.json").write_text(json.dumps(steady))
    measured, verdict, why = aims()[aim]
    assert (measured.split(", in one run")[0], verdict) == ("89.0%, TPOT 40.000 ms", "**missed**")
    assert "took 0.4 us a token more than the target" in why

    whole, parts = "a plan where 64 prompts wait, with their chunk's size and turns, by records", "p50   20.00 us"
    (tmp_path / "planner_slow_h200.txt").write_text(
        f"AdaptivePolicy, records  {parts}, p99\nprompt_budget, records  {parts}\ntake_turns, records  {parts}\n"
    )
    assert aims()[f"the cost of {whole}: 50 µs"][:2] == ["60.0 µs", "**missed**"], "the sum of its parts"
    newest = "AdaptivePolicy, records p50 49.90 us, p99 60.00 us, rounds 41.06 to 55.00 us  plans\n"
    newest += "AdaptivePolicy, records, all of it for 64 prompts p50 50.10 us, p99 70.00 us, rounds 44.00 to 56.00 us\n"
    (tmp_path / "planner_rounds_h200.txt").write_text(newest)
    measured = "49.9 µs, 41.1 to 55.0 in rounds; earlier versions on other hosts 20.0"
    assert aims()["the cost of a plan, by records: 50 µs"] == [measured, "met", ""]
    assert aims()[f"the cost of {whole}: 50 µs"][1] == "**missed**", "the newest version's figure counts"
    for seconds, verdict in ((180, "met"), (181, "**missed**")):
        (tmp_path / "profile_h200.txt").write_text(f"a line\n470 latencies in {seconds} s: a/file.json\n")
        assert aims()["`cotenant profile`: 180 s"][:2] == [f"{seconds} s, an earlier version", verdict]
