"""What co-execution was to reach on one H200, and what it has: computed from the committed results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cotenant.bench.comparison import REFERENCE, SUBJECT, compare, is_at
from cotenant.bench.device_losses import HEADER as LOSSES
from cotenant.bench.device_losses import loss_rows
from cotenant.cli.colocate_parts import joined
from renderers.errors import newest_rows, place_text, prediction_rows, spot
from renderers.planning import Target, planning_rows
from renderers.text import Result, table

_GRID, _STEADY = "colocate_grid_h200.json", "colocate_steady_h200.json"
_PREDICTED = "colocate_predicted_h200.json"  # the grid under one policy, by a newer version
_AGAIN = "colocate_again_h200.json"  # most of the grid, without serving alone, by a newer version of another policy
# The grid's places with serving alone, by versions later than all of these: `static` in the first part alone.
_LATER = ("colocate_half_h200.json", "colocate_rest_h200.json", "colocate_code_half_h200.json")
_OWN_RATE = "colocate_own_rate_h200.json"  # of the conversation, by a version later than all of these
_HALVES = "colocate_two_gpus_h200.json"  # half the traces' rates under one policy, later still
_TWICE = "colocate_code_twice_h200.json"  # where ``_AGAIN`` is late, by a later version, with serving alone
_BETWEEN = "colocate_between_h200.json"  # later still: all those places, beside policies that train between requests
_HEADER = ("", "aimed at", "measured", "", "what stands in the way, and what would move it")
_ABOVE = (
    "What was aimed at before anything was measured, for Llama-3.1-8B in bf16 on one H200, and what it came to. "
    "Harvest is the job's speed as a share of what it has with the GPU to itself."
)
_STEADY_RUNS = 5  # the newest, whose sequences are timed alike
_ATTAINMENT = 0.99
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
    "Late: {late}. Serving alone was not measured in that run; in the grid it is in time there, but its TPOT p99 is "
    "not far below the target, either: prompts' chunks are as large as targets allow, whoever trains. By [a later "
    "version](#on-a-gpu-the-code-trace-at-twice-its-rate-by-a-later-version) both are in time there."
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
    paths = [
        results / name for name in (_GRID, _STEADY, _PREDICTED, _AGAIN, _BETWEEN, _OWN_RATE, _HALVES, _TWICE, *_LATER)
    ]
    if not all(path.exists() for path in paths):
        return []
    read = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
    grid, steady, predicted, again, between, own_rate, halves, twice, *later = read
    whole = joined(dict(zip(_LATER, later, strict=True)))
    rows = [*_steady_rows(steady), *_conversation_rows(grid), *_own_rate_rows(own_rate)]
    rows += [*_grid_rows(grid), *_again_rows(grid, again), *_twice_rows(twice)]
    rows += [*_later_rows(whole), *_between_rows(between), *prediction_rows(grid, predicted, again, whole, between)]
    rows += [*_halves_rows(halves), *planning_rows(results)]
    told = [*(_row(*row) for row in rows), *([*row, "tested", ""] for row in _TESTED)]
    return ["## What was aimed at", _ABOVE, table(_HEADER, told)]


def _row(load: str, aim: str, measured: str, is_met: bool, why: str) -> list[str]:
    return [load, aim, measured, "met" if is_met else "**missed**", "" if is_met else why]


def _steady_rows(steady: Sequence[Result]) -> Iterator[Target]:
    """Of the runs that are timed alike: met where the newest version meets it."""
    for tpot_ms, aim in ((10, 0.6), (40, 0.88)):
        runs = [(run, cell) for run in steady if (cell := _steady_cell(run, SUBJECT, tpot_ms))][-_STEADY_RUNS:]
        name = f"32 sequences of about 1,024 tokens, TPOT {tpot_ms} ms"
        (newest_run, newest), before = runs[-1], [cell for _, cell in runs[:-1]]
        harvest, mean_ms = newest["harvest"], newest["tpot_ms"]["mean"]
        is_met = harvest >= aim and newest["attainment"] >= _ATTAINMENT
        over_ms = mean_ms - tpot_ms
        text = f"{_beside(harvest, aim)}, TPOT {mean_ms:.{3 if over_ms > 0 else 1}f} ms, in one run; "
        text += "earlier ones on other cards " + ", ".join(_beside(cell["harvest"], aim) for cell in before)
        yield name, f"harvest {aim:.0%}", text, is_met, "" if is_met else _why_missed(newest_run, newest, aim)


def _beside(share: float, aim: float) -> str:
    """With as many digits as tell it from the aim."""
    return f"{share:.{2 if share < aim and f'{share:.1%}' == f'{aim:.1%}' else 1}%}"


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


def _conversation_rows(grid: Result) -> Iterator[Target]:
    places = {
        place["place"]["time_scale"]: (place, cell)
        for place in grid["comparison"]["places"]
        for cell in grid["cells"]
        if cell["policy"] == SUBJECT and is_at(cell, place["place"])
        if cell["trace"] == "conv" and cell["slo"]["tpot_ms"] == 40.0
    }
    _, cell = places[1.0]
    name, latencies = "conversation at its own rate, 40 ms", [cell[kind]["p99"] for kind in ("ttft_ms", "tpot_ms")]
    text = "TTFT p99 {:.0f} ms, TPOT p99 {:.1f} ms".format(*latencies)
    yield name, "TTFT p99 500 ms, TPOT p99 40 ms", text, latencies[0] <= 500 and latencies[1] <= 40, _PROMPTS
    yield name, "harvest 75%", f"{cell['harvest']:.1%}", cell["harvest"] >= 0.75, _PROMPTS
    for scale, times in ((2.0, "twice"), (4.0, "four times")):
        place, cell = places[scale]
        best = max(_others(place), key=lambda policy: policy[1])
        is_met = cell["attainment"] >= grid["comparison"]["slo_attainment"] and cell["harvest"] >= best[1]
        text = f"{cell['attainment']:.1%} in time; {cell['harvest']:.1%}, `{best[0]}` {best[1]:.1%}"
        yield f"the same at {times} its rate", "99% in time, most harvest", text, is_met, _PROMPTS


def _own_rate_rows(runs: Sequence[Result]) -> Iterator[Target]:
    cells = [cell for run in runs for cell in run["cells"] if cell["policy"] == SUBJECT]
    cells = [cell for cell in cells if cell["slo"]["tpot_ms"] == 40.0]
    name = "conversation at its own rate, 40 ms, [by a later version](#on-a-gpu-the-conversation-at-its-own-rate)"
    ttfts, tpots = ([cell[kind]["p99"] for cell in cells] for kind in ("ttft_ms", "tpot_ms"))
    text = f"TTFT p99 {max(ttfts):.0f} ms, TPOT p99 {max(tpots):.1f} ms at most"
    yield name, "TTFT p99 500 ms, TPOT p99 40 ms", text, max(ttfts) <= 500 and max(tpots) <= 40, _PROMPTS
    harvests = [cell["harvest"] for cell in cells]
    free = [shares[_WITHOUT_DECODE] for run in runs for cell, shares in loss_rows(run["cells"]) if cell in cells]
    why = _PROMPTS + _WITHOUT_DECODES.format(least=min(free, key=_number), most=max(free, key=_number))
    with_copies = [run.get("compressed") for run in runs for cell in run["cells"] if cell in cells]
    text = ", ".join(
        f"{harvest:.1%}{' from compressed weights' if each else ''}"
        for harvest, each in zip(harvests, with_copies, strict=True)
    )
    yield name, "harvest 75%", text, min(harvests) >= 0.75, why


def _number(percent: str) -> float:
    return float(percent.removesuffix("%"))


def _grid_rows(grid: Result) -> Iterator[Target]:
    comparison = grid["comparison"]
    name = "the grid, where serving alone is in time"
    yield from _place_rows(name, comparison)
    yield _ratio_row(name, comparison, "static", 1.75)
    yield _two_gpus_row("a trace at half its rate on each", comparison)


def _later_rows(whole: Result) -> Iterator[Target]:
    """All that train were measured at each place, but for `static`: its average is over those that have it."""
    name = "[these places by later versions](#on-a-gpu-half-of-the-grid-by-a-later-version), on three hosts"
    alone = _alone(whole)
    without = {**whole, "cells": [cell for cell in whole["cells"] if cell["policy"] != "static"]}
    comparison = _compared(without, alone)
    yield from _place_rows(name, comparison)
    yield _ratio_row(name, _compared(whole, alone), "static", 1.75)
    yield _two_gpus_row("the same by later versions", comparison)


def _between_rows(between: Result) -> Iterator[Target]:
    """Those that come near ``SUBJECT`` were not measured there, so it says nothing of the best other."""
    where = "[beside training between requests](#on-a-gpu-the-grids-places-beside-training-between-requests)"
    name = f"these places {where}, on one more host"
    comparison = between["comparison"]
    yield _in_time_row(name, comparison)
    yield _ratio_row(name, comparison, "static", 1.75)
    yield _two_gpus_row(f"the same {where}, on one more host", comparison)


def _halves_rows(halves: Result) -> Iterator[Target]:
    where = "[at half the traces' rates](#on-a-gpu-half-of-a-trace-for-each-of-two-gpus), from compressed weights"
    yield _two_gpus_row(f"the same {where}", halves["comparison"])
    yield from newest_rows(f"errors of prediction beside a job {where}", halves)


def _alone(run: Result) -> dict[tuple[str, float, float], Result]:
    """Its cells of serving alone, by their places."""
    return {spot(cell): cell for cell in run["cells"] if cell["policy"] == REFERENCE}


def _compared(run: Result, alone: Mapping[tuple[str, float, float], Result]) -> Result:
    """Its policies where serving alone is in time."""
    in_time = [cell for cell in run["cells"] if alone[spot(cell)]["attainment"] >= _ATTAINMENT]
    return compare({**run, "cells": in_time}, _ATTAINMENT)


def _place_rows(name: str, comparison: Result) -> Iterator[Target]:
    yield _in_time_row(name, comparison)
    number, behind = _num_places(comparison), comparison["behind"]
    num_short = len(behind) + len([place for place in comparison["misses"] if place not in behind])  # most are both
    text = f"{number - num_short}"
    yield name, f"at most 3% behind the best other in time, at all {number}", text, num_short == 0, ""
    for key, aim in (("best_other", 1.15), ("chunked", 1.38)):
        yield _ratio_row(name, comparison, key, aim)


def _in_time_row(name: str, comparison: Result) -> Target:
    number, missed = _num_places(comparison), len(comparison["misses"])
    return name, f"in time at all {number} places", f"{number - missed}", not missed, ""


def _num_places(comparison: Result) -> int:
    """Where serving alone is in time."""
    return sum(place["policies"][REFERENCE]["meets_slo"] for place in comparison["places"])


def _ratio_row(name: str, comparison: Result, key: str, aim: float) -> Target:
    """Of averages over the places where all policies of the comparison were measured."""
    found, trained = comparison["ratios"][key], comparison["averages"].keys()
    whole = [place for place in comparison["places"] if trained <= place["policies"].keys()]
    other = f"the best other, `{found['policy']}`" if key == "best_other" else f"`{key}`"
    why = _OTHERS.format(**_ratios(whole, found["policy"]), policy=found["policy"])
    num_trained = sum(SUBJECT in place["policies"] for place in comparison["places"])
    text = f"{found['ratio']:.2f}" + (f", of {len(whole)} places" if len(whole) < num_trained else "")
    return name, f"on average {aim} times {other}", text, found["ratio"] >= aim, why


def _two_gpus_row(name: str, comparison: Result) -> Target:
    entries = [each["ratio"] for each in comparison["two_gpus"] if each["time_scale"] == _TWO_GPUS_RATE]
    mean, why = statistics.fmean(entries), _TIGHT.format(least=min(entries), most=max(entries))
    aim = "two GPUs that share train 1.5 times what one that serves and one that trains do"
    return name, aim, f"{mean:.3f}", mean >= 1.5, why


def _again_rows(grid: Result, again: Result) -> Iterator[Target]:
    """In those of its places where serving alone is in time in the grid; averages over those with all policies."""
    alone = _alone(grid)
    comparison = _compared(again, alone)
    places = [place for place in comparison["places"] if SUBJECT in place["policies"]]
    late = [place for place in places if not place["policies"][SUBJECT]["meets_slo"]]
    name = "[the same again](#on-a-gpu-the-grid-again-llmstation-in-partitions), `llmstation` in partitions"
    whose = "; ".join(_late(place, alone[spot(place["place"])]) for place in late)
    text = f"{len(places) - len(late)}"
    yield name, f"in time at all {len(places)} places", text, not late, _LATE.format(late=whose)
    for key, aim in (("best_other", 1.15), ("chunked", 1.38)):
        yield _ratio_row(name, comparison, key, aim)


def _twice_rows(twice: Result) -> Iterator[Target]:
    where = (
        "[by a later version](#on-a-gpu-the-code-trace-at-twice-its-rate-by-a-later-version), from compressed weights"
    )
    places = " and ".join(f"{tpot_ms:g}" for tpot_ms in sorted({cell["slo"]["tpot_ms"] for cell in twice["cells"]}))
    yield _in_time_row(f"of these, code x 2 at {places} ms {where}", twice["comparison"])


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
