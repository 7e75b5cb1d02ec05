"""What co-execution was to reach on one H200, and what it has: computed from the committed results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cotenant.bench.comparison import REFERENCE, SUBJECT, compare
from cotenant.bench.device_losses import HEADER as LOSSES
from cotenant.bench.device_losses import loss_rows
from renderers.errors import place_text, prediction_rows, spot
from renderers.planning import planning_rows
from renderers.target import HEADER, Measured, Target, link
from renderers.text import Result, beside, table
from renderers.whole_grid import ATTAINMENT, NEWEST, WHERE, whole_grid

_GRID, _STEADY = "colocate_grid_h200.json", "colocate_steady_h200.json"
_PREDICTED = "colocate_predicted_h200.json"  # the grid under one policy, by a newer version
_AGAIN = "colocate_again_h200.json"  # most of the grid, without serving alone, by a newer version of another policy
_OWN_RATE = "colocate_own_rate_h200.json"  # of the conversation, by a version later than all of these and ``FILES``
_HALVES = "colocate_two_gpus_h200.json"  # half the traces' rates under one policy, later still
_TWICE = "colocate_code_twice_h200.json"  # where ``_AGAIN`` is late, by a later version, with serving alone
_BETWEEN = "colocate_between_h200.json"  # later still: all those places, beside policies that train between requests
_IN_GRID = link("in the grid", "the-grid-of-targets-rates-and-traces")
_UNDER_ONE = link("over the grid", "errors-of-prediction-over-the-grid")
_IN_AGAIN = link("in the grid again", "the-grid-again-llmstation-in-partitions")
_BESIDE = link("in them beside training between requests", "the-grids-places-beside-training-between-requests")
_AT_OWN_RATE = link("in three runs", "the-conversation-at-its-own-rate")
_AT_HALVES = link("at half the traces' rates, from compressed weights", "half-of-a-trace-for-each-of-two-gpus")
_IN_NEWEST = link("in the newest grid", "the-grids-places-by-the-newest-version")
_AT_TWICE = link("since", "the-code-trace-at-twice-its-rate-by-a-later-version")
_ABOVE = (
    "What was aimed at before anything was measured, for Llama-3.1-8B in bf16 on one H200, and what the newest version "
    "that was measured for it came to, with versions before, bold where they missed it. Harvest is the job's speed as "
    "a share of what it has with the GPU to itself."
)
_STEADY_RUNS = 5  # the newest, whose sequences are timed alike
_WITHOUT_DECODE = LOSSES.index("harvest if decode cost nothing")
_TWO_GPUS_RATE = 1.0  # of the trace on two GPUs: each has half of it

_POWER = (
    "[The board's power](#on-a-gpu-steady-sequences-again), at its limit all the time: of the {allowed:.2f} J that "
    "{limit:.0f} W allow in {tpot_ms:g} ms both took {drawn:.2f}, at lower clocks than each by itself, where a step "
    "takes {step:.2f} J and {aim:.0%} of training's speed {training:.2f}. [Most of a step's brings weights "
    "in](#on-a-gpu-what-reading-the-weights-costs-in-energy); [the "
    "rest](#on-a-gpu-what-a-job-has-beside-a-steps-products) is about what multiplying with them takes by any kernel. "
    "Fewer bits a weight, more watts, or a card that does more with them."
)
_OVER = (
    "The sequences that were timed took {over:.1f} us a token more than the target: a stretch of a long answer that "
    "begins ahead of it may take longer than its tokens may."
)
_SOME_LATE = "{late:.0%} of the sequences that were timed were late."
_PROMPTS = (
    "Prompts leave no SM unused, and [what they take](#on-a-gpu-the-grid-of-targets-rates-and-traces) no training can "
    "have; then decode steps, each of which reads all weights. Prompts that the prefix cache has, and fewer bits a "
    "weight."
)
_WITHOUT_DECODES = " If decode steps cost nothing it would be {least} to {most}."
_OTHERS = (
    "All that train go by the same engine, slack, sizes of prompt chunks and learned margin, and where a step is long "
    "for its target nobody gets much: {least:.2f} to {most:.2f} times the best other in time, place by place. Whether "
    "a place counts for another is up to one late request of a hundred; were all counted, in time or not, it would be "
    "{all:.2f} times `{policy}`. Cheaper decode steps, as above, help `" + SUBJECT + "` and the others alike."
)
_TIGHT = (
    "The average is over targets and traces, from {least:.2f} to {most:.2f}: the tighter the target, the less of each "
    "token's time is training's, and under the conversation the more it is up to [the "
    "clocks](#on-a-gpu-the-grids-places-beside-training-between-requests) that a card has at its power limit. Looser "
    "targets, fewer bits a weight, or more watts."
)
_LATE = (
    "Late [in the grid again](#on-a-gpu-the-grid-again-llmstation-in-partitions): {late}. Serving alone was not "
    "measured in that run; in the grid it is in time there, but its TPOT p99 is not far below the target, either: "
    "prompts' chunks are as large as targets allow, whoever trains."
)
_TESTED = (
    (
        "answers and adapters beside each other, of small models",
        "those of the two tasks run apart",
        "bit for bit in float32 on a CPU (tests/runtime/test_coexecution.py), within bf16's noise on a GPU "
        "(tests/gpu/test_parity.py, test_partitions.py)",
    ),
    (
        "on a CPU",
        "the same planner, beside `whole-step`",
        "tests/scheduler, tests/runtime/test_loop.py; [policies side by side](#policies-side-by-side), and the report "
        "of `make demo`",
    ),
)


def section(results: Path) -> list[str]:
    """Nothing where the results that it tells of are not among these."""
    names = (_GRID, _STEADY, _PREDICTED, _AGAIN, _BETWEEN, _OWN_RATE, _HALVES, _TWICE, NEWEST)
    paths = [results / name for name in names]
    whole = whole_grid(results)
    if whole is None or not all(path.exists() for path in paths):
        return []
    read = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
    grid, steady, predicted, again, between, own_rate, halves, twice, newest = read
    runs = [(_UNDER_ONE, predicted), (_IN_AGAIN, again), (WHERE, whole), (_BESIDE, between), (_AT_HALVES, halves)]
    runs.append((_IN_NEWEST, newest))
    rows = [*_steady_rows(steady), *_conversation_rows(grid, own_rate, newest), *_crowded_rows(grid, whole)]
    rows += [*_grid_rows(grid, again, twice, whole, between, halves, newest), *prediction_rows(grid, runs)]
    rows += planning_rows(results)
    tested = [[load, aim, how, "tested", "", ""] for load, aim, how in _TESTED]
    return ["## What was aimed at", _ABOVE, table(HEADER, [*(row.row() for row in rows), *tested])]


def _steady_rows(steady: Sequence[Result]) -> Iterator[Target]:
    """Of the runs that are timed alike: met where the newest version meets it."""
    for tpot_ms, aim in ((10, 0.6), (40, 0.88)):
        runs = [(run, cell) for run in steady if (cell := _steady_cell(run, SUBJECT, tpot_ms))][-_STEADY_RUNS:]
        name = f"32 sequences of about 1,024 tokens, TPOT {tpot_ms} ms"
        (newest_run, newest), before = runs[-1], [cell for _, cell in runs[:-1]]
        harvest, mean_ms = newest["harvest"], newest["tpot_ms"]["mean"]
        is_met = harvest >= aim and newest["attainment"] >= ATTAINMENT
        over_ms = mean_ms - tpot_ms
        text = f"{beside(harvest, aim)}, TPOT {mean_ms:.{3 if over_ms > 0 else 1}f} ms"
        why = "" if is_met else _why_missed(newest_run, newest, aim)
        versions = [Measured(beside(cell["harvest"], aim), cell["harvest"] >= aim) for cell in before]
        yield Target(name, f"harvest {aim:.0%}", [*versions, Measured(text, is_met, why)])


def _steady_cell(run: Result, policy: str, tpot_ms: float) -> Result | None:
    cells = (cell for cell in run["cells"] if cell["policy"] == policy and cell["slo"]["tpot_ms"] == tpot_ms)
    return next(cells, None)


def _why_missed(run: Result, cell: Result, aim: float) -> str:
    tpot_ms, mean_ms = cell["slo"]["tpot_ms"], cell["tpot_ms"]["mean"]
    if cell["harvest"] >= aim:
        over_ms = mean_ms - tpot_ms
        return _OVER.format(over=over_ms * 1e3) if over_ms > 0 else _SOME_LATE.format(late=1 - cell["attainment"])
    alone, serving = run["train_alone_utilisation"], _steady_cell(run, REFERENCE, tpot_ms)
    assert serving is not None, f"{REFERENCE} was not measured at {tpot_ms} ms"
    return _POWER.format(
        allowed=alone["power_limit_w"] * tpot_ms / 1e3,
        limit=alone["power_limit_w"],
        tpot_ms=tpot_ms,
        drawn=cell["utilisation"]["power_w"] * tpot_ms / 1e3,
        step=serving["utilisation"]["power_w"] * serving["tpot_ms"]["mean"] / 1e3,
        aim=aim,
        training=aim * alone["power_w"] * tpot_ms / 1e3,
    )


def _conversation_rows(grid: Result, runs: Sequence[Result], newest: Result) -> Iterator[Target]:
    """At its own rate: of the grid, of the runs of it since, and of the newest grid."""
    name, place = "conversation at its own rate, 40 ms", ("conv", 1.0, 40.0)

    def ours(run: Result) -> list[Result]:
        return [cell for cell in run["cells"] if cell["policy"] == SUBJECT and spot(cell) == place]

    (first,), (last,), cells = ours(grid), ours(newest), [cell for run in runs for cell in ours(run)]
    versions = [_latencies([first], _IN_GRID), _latencies(cells, f"at most, {_AT_OWN_RATE}")]
    yield Target(name, "TTFT p99 500 ms, TPOT p99 40 ms", [*versions, _latencies([last], _IN_NEWEST)])
    free = [
        shares[_WITHOUT_DECODE]
        for run in (*runs, newest)
        for cell, shares in loss_rows(run["cells"])
        if cell in (*cells, last)
    ]
    why = _PROMPTS + _WITHOUT_DECODES.format(least=min(free, key=_number), most=max(free, key=_number))
    versions = [
        Measured(
            ", ".join(beside(cell["harvest"], 0.75) for cell in of_version),
            all(cell["harvest"] >= 0.75 for cell in of_version),
            why,
            where,
        )
        for of_version, where in (([first], _IN_GRID), (cells, _AT_OWN_RATE), ([last], _IN_NEWEST))
    ]
    yield Target(name, "harvest 75%", versions)


def _latencies(cells: Sequence[Result], where: str) -> Measured:
    ttft_ms, tpot_ms = (max(cell[kind]["p99"] for cell in cells) for kind in ("ttft_ms", "tpot_ms"))
    text = f"TTFT p99 {ttft_ms:.0f} ms, TPOT p99 {tpot_ms:.1f} ms"
    return Measured(text, ttft_ms <= 500 and tpot_ms <= 40, _PROMPTS, where)


def _crowded_rows(grid: Result, whole: Result) -> Iterator[Target]:
    alone = _alone(whole)
    for scale, times in ((2.0, "twice"), (4.0, "four times")):
        versions = []
        for comparison, where in ((grid["comparison"], _IN_GRID), (_compared(whole, alone), WHERE)):
            (place,) = (each for each in comparison["places"] if spot(each["place"]) == ("conv", scale, 40.0))
            best, ours = max(_others(place), key=lambda policy: policy[1]), place["policies"][SUBJECT]
            text = f"{ours['attainment']:.1%} in time; {ours['harvest']:.1%}, `{best[0]}` {best[1]:.1%}"
            is_met = ours["attainment"] >= ATTAINMENT and ours["harvest"] >= best[1]
            versions.append(Measured(text, is_met, _PROMPTS, where))
        yield Target(f"conversation at {times} its rate, 40 ms", "99% in time, most harvest", versions)


def _number(percent: str) -> float:
    return float(percent.removesuffix("%"))


def _grid_rows(
    grid: Result, again: Result, twice: Result, whole: Result, between: Result, halves: Result, newest: Result
) -> Iterator[Target]:
    """Of the places where serving alone is in time, which `again` has not measured: it goes by the grid. In ``whole``
    all that train were measured at each place, but for `static`: its average is over those that have it. In
    ``between`` and ``newest`` those that come near ``SUBJECT`` were not, so they say nothing of the best other."""
    name = "the grid, where serving alone is in time"
    first, alone = grid["comparison"], _alone(grid)
    second = _compared(again, alone)
    without = {**whole, "cells": [cell for cell in whole["cells"] if cell["policy"] != "static"]}
    third, with_static = _compared(without, _alone(whole)), _compared(whole, _alone(whole))
    last, now = between["comparison"], _with_alone(newest, whole)
    versions = [_in_time(first, _IN_GRID), _again_in_time(second, alone, twice), _in_time(third, WHERE)]
    versions += [_in_time(last, _BESIDE), _in_time(now, _IN_NEWEST)]
    yield Target(name, "in time at all places", versions)
    aim = "at most 3% behind the best other in time, at all places"
    yield Target(name, aim, [_close(first, _IN_GRID), _close(third, WHERE)])
    compared = ((first, _IN_GRID), (second, _IN_AGAIN), (third, WHERE))
    versions = [_ratio(comparison, "best_other", 1.15, where) for comparison, where in compared]
    yield Target(name, "on average 1.15 times the best other", versions)
    versions = [_ratio(comparison, "chunked", 1.38, where) for comparison, where in (*compared, (now, _IN_NEWEST))]
    yield Target(name, "on average 1.38 times `chunked`", versions)
    compared = ((first, _IN_GRID), (with_static, WHERE), (last, _BESIDE))
    versions = [_ratio(comparison, "static", 1.75, where) for comparison, where in compared]
    yield Target(name, "on average 1.75 times `static`", versions)
    compared = ((first, _IN_GRID), (third, WHERE), (last, _BESIDE), (halves["comparison"], _AT_HALVES))
    compared = (*compared, (now, _IN_NEWEST))
    aim = "two GPUs that share train 1.5 times what one that serves and one that trains do"
    yield Target("a trace at half its rate on each of two", aim, [_two_gpus(*each) for each in compared])


def _alone(run: Result) -> dict[tuple[str, float, float], Result]:
    """Its cells of serving alone, by their places."""
    return {spot(cell): cell for cell in run["cells"] if cell["policy"] == REFERENCE}


def _compared(run: Result, alone: Mapping[tuple[str, float, float], Result]) -> Result:
    """Its policies where serving alone is in time."""
    in_time = [cell for cell in run["cells"] if alone[spot(cell)]["attainment"] >= ATTAINMENT]
    return compare({**run, "cells": in_time}, ATTAINMENT)


def _with_alone(newest: Result, whole: Result) -> Result:
    """Its comparison, where it has not measured serving alone with what it came to there in ``whole``."""
    measured = _alone(newest)
    alone = [cell for place, cell in _alone(whole).items() if place not in measured]
    return _compared({**newest, "cells": [*newest["cells"], *alone]}, {**_alone(whole), **measured})


def _in_time(comparison: Result, where: str) -> Measured:
    number, missed = _num_places(comparison), len(comparison["misses"])
    return Measured(f"{number - missed} of {number}", not missed, "", where)


def _again_in_time(comparison: Result, alone: Mapping[tuple[str, float, float], Result], twice: Result) -> Measured:
    """``twice``: where it is late, by a later version."""
    places = [place for place in comparison["places"] if SUBJECT in place["policies"]]
    late = [place for place in places if not place["policies"][SUBJECT]["meets_slo"]]
    since = _in_time(twice["comparison"], "").text
    text = f"{len(places) - len(late)} of {len(places)}"
    why = _LATE.format(late="; ".join(_late(place, alone[spot(place["place"])]) for place in late))
    where = f"{_IN_AGAIN} ({since} of the others {_AT_TWICE})" if late else _IN_AGAIN
    return Measured(text, not late, why, where)


def _close(comparison: Result, where: str) -> Measured:
    number, behind = _num_places(comparison), comparison["behind"]
    num_short = len(behind) + len([place for place in comparison["misses"] if place not in behind])  # most are both
    return Measured(f"{number - num_short} of {number}", num_short == 0, "", where)


def _num_places(comparison: Result) -> int:
    """Where serving alone is in time."""
    return sum(place["policies"][REFERENCE]["meets_slo"] for place in comparison["places"])


def _ratio(comparison: Result, key: str, aim: float, where: str) -> Measured:
    """Of averages over the places where all policies of the comparison were measured."""
    found, trained = comparison["ratios"][key], comparison["averages"].keys()
    whole = [place for place in comparison["places"] if trained <= place["policies"].keys()]
    why = _OTHERS.format(**_ratios(whole, found["policy"]), policy=found["policy"])
    num_trained = sum(SUBJECT in place["policies"] for place in comparison["places"])
    text = f"{found['ratio']:.2f}" + (f", `{found['policy']}`," if key == "best_other" else "")
    text += f" of {len(whole)} places" if len(whole) < num_trained else ""
    return Measured(text, found["ratio"] >= aim, why, where)


def _two_gpus(comparison: Result, where: str) -> Measured:
    entries = [each["ratio"] for each in comparison["two_gpus"] if each["time_scale"] == _TWO_GPUS_RATE]
    mean, why = statistics.fmean(entries), _TIGHT.format(least=min(entries), most=max(entries))
    return Measured(f"{mean:.3f}", mean >= 1.5, why, where)


def _late(place: Result, alone: Result) -> str:
    """``alone``: the grid's cell of serving alone there."""
    each = [f"`{policy}` {figures['attainment']:.1%} in time" for policy, figures in place["policies"].items()]
    each[-1] += f"; serving alone in the grid: TPOT p99 {alone['tpot_ms']['p99']:.1f} ms"
    return f"{place_text(place['place'])} ({', '.join(each)})"


def _others(place: Result) -> Iterator[tuple[str, float]]:
    """Those that train, and are in time, and what they harvest."""
    for policy, figures in place["policies"].items():
        if policy not in (SUBJECT, REFERENCE) and figures["meets_slo"]:
            yield policy, figures["harvest"]


def _ratios(places: Sequence[Mapping[str, Any]], policy: str) -> dict[str, float]:
    """``least``, ``most``: beside the best other in time. ``all``: on average beside ``policy``, in time or not."""
    each = [
        place["policies"][SUBJECT]["harvest"] / best
        for place in places
        if (best := max((harvest for _, harvest in _others(place)), default=0.0))
    ]
    sums = [sum(place["policies"][name]["harvest"] for place in places) for name in (SUBJECT, policy)]
    return {"least": min(each), "most": max(each), "all": sums[0] / sums[1]}
