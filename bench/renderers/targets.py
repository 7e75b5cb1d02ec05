"""What co-execution was to reach on one H200, and what it has: computed from the committed results."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cotenant.bench.comparison import REFERENCE, SUBJECT, place_key
from renderers.text import Result, table

_GRID, _STEADY = "colocate_grid_h200.json", "colocate_steady_h200.json"
_PLANNING = ("planner_h200.txt", "planner_slow_h200.txt")
_HEADER = ("", "aimed at", "measured", "", "what stands in the way, and what would move it")
_ABOVE = (
    "What was aimed at before anything was measured, for Llama-3.1-8B in bf16 on one H200, and what it came to. "
    "Harvest is the job's speed as a share of what it has with the GPU to itself."
)
_ATTAINMENT = 0.99
_TWO_GPUS_RATE = 1.0  # of the trace on two GPUs: each has half of it

_POWER = (
    "[The board's power](#on-a-gpu-steady-sequences-again): at its limit all the time, so the clocks fall for what a "
    "step beside training draws; [most of that brings weights in](#on-a-gpu-what-reading-the-weights-costs-in-energy). "
    "Fewer bits a weight, or more watts."
)
_PROMPTS = (
    "Prompts leave no SM unused, and [what they take](#on-a-gpu-the-grid-of-targets-rates-and-traces) no training can "
    "have; then decode steps, each of which reads all weights. Prompts that the prefix cache has, and fewer bits a "
    "weight."
)
_OTHERS = (
    "All that train go by the same engine, slack, sizes of prompt chunks and learned margin, and where a step is long "
    "for its target nobody gets much: {least:.2f} to {most:.2f} times the best other in time, place by place. Whether "
    "a place counts for another is up to one late request of a hundred; were all counted, in time or not, it would be "
    "{all:.2f} times `{policy}`. Cheaper decode steps, as above, help `" + SUBJECT + "` and the others alike."
)
_TIGHT = (
    "The average is over targets and traces, from {least:.2f} to {most:.2f}: the tighter the target, the less of each "
    "token's time is training's. Looser targets, or fewer bits a weight."
)
_SLOW = (
    "One host takes more than twice the time of the other for all that is asked here. It is spent while the device has "
    "a batch in flight. Less Python in a plan, or a language that is compiled."
)
_FEW = (
    "Beside a job few batches have the device alone, down to {num} in a cell, so one or two of them decide. Most have "
    "prompts and come soon after training, which has lowered the clocks. More of them: longer cells, or idle pauses."
)


def section(results: Path) -> list[str]:
    """Nothing where the results that it tells of are not among these."""
    paths = [results / name for name in (_GRID, _STEADY)]
    if not all(path.exists() for path in paths):
        return []
    grid, steady = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
    rows = [*_steady_rows(steady), *_conversation_rows(grid), *_grid_rows(grid), *_prediction_rows(grid)]
    rows += _planning_rows([results / name for name in _PLANNING if (results / name).exists()])
    return ["## What was aimed at", _ABOVE, table(_HEADER, [_row(*row) for row in rows])]


def _row(load: str, aim: str, measured: str, is_met: bool, why: str) -> list[str]:
    return [load, aim, measured, "met" if is_met else "**missed**", "" if is_met else why]


def _steady_rows(steady: Sequence[Result]) -> Iterator[tuple[str, str, str, bool, str]]:
    """Of the newest run."""
    for tpot_ms, aim in ((10, 0.6), (40, 0.88)):
        (cell,) = [c for c in steady[-1]["cells"] if c["policy"] == SUBJECT and c["slo"]["tpot_ms"] == tpot_ms]
        name = f"32 sequences of about 1,024 tokens, TPOT {tpot_ms} ms"
        is_met = cell["harvest"] >= aim and cell["attainment"] >= _ATTAINMENT
        text = f"{cell['harvest']:.1%}, TPOT {cell['tpot_ms']['mean']:.1f} ms"
        yield name, f"harvest {aim:.0%}", text, is_met, _POWER


def _conversation_rows(grid: Result) -> Iterator[tuple[str, str, str, bool, str]]:
    places = {
        place["place"]["time_scale"]: (place, cell)
        for place in grid["comparison"]["places"]
        for cell in grid["cells"]
        if cell["policy"] == SUBJECT and place_key(cell) == place_key(place["place"])
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


def _grid_rows(grid: Result) -> Iterator[tuple[str, str, str, bool, str]]:
    comparison = grid["comparison"]
    places = [place for place in comparison["places"] if place["policies"][REFERENCE]["meets_slo"]]
    number = len(places)
    missed, behind = len(comparison["misses"]), len(comparison["behind"])
    name = "the grid, where serving alone is in time"
    yield name, f"in time at all {number} places", f"{number - missed}", not missed, ""
    text = f"{number - behind - missed}"
    yield name, f"at most 3% behind the best other in time, at all {number}", text, not (behind or missed), ""
    for key, aim in (("best_other", 1.15), ("chunked", 1.38), ("static", 1.75)):
        found = comparison["ratios"][key]
        other = f"the best other, `{found['policy']}`" if key == "best_other" else f"`{key}`"
        why = _OTHERS.format(**_ratios(places, found["policy"]), policy=found["policy"])
        yield name, f"on average {aim} times {other}", f"{found['ratio']:.2f}", found["ratio"] >= aim, why
    entries = [each["ratio"] for each in comparison["two_gpus"] if each["time_scale"] == _TWO_GPUS_RATE]
    mean, why = statistics.fmean(entries), _TIGHT.format(least=min(entries), most=max(entries))
    aim = "two GPUs that share train 1.5 times what one that serves and one that trains do"
    yield "a trace at half its rate on each", aim, f"{mean:.3f}", mean >= 1.5, why


def _prediction_rows(grid: Result) -> Iterator[tuple[str, str, str, bool, str]]:
    errors = grid["comparison"]["prediction"]
    name = "errors of prediction, over the grid"
    serving_mean, alone_mean, shared_mean = (
        errors[policy][kind]["mean"] for policy, kind in ((REFERENCE, "alone"), (SUBJECT, "alone"), (SUBJECT, "co_run"))
    )
    text = f"{serving_mean:.1%} where nothing trains, {alone_mean:.1%} beside a job"
    yield name, "mean 3% alone", text, max(serving_mean, alone_mean) <= 0.03, ""
    yield name, "mean 5% with training", f"{shared_mean:.1%}", shared_mean <= 0.05, ""
    beside, by_itself = (
        [cell["prediction_error"] for cell in grid["cells"] if cell["policy"] == policy]
        for policy in (SUBJECT, REFERENCE)
    )
    shared_p95 = max(each["co_run"]["p95"] for each in beside if each["co_run"])
    yield name, "p95 10% with training, in each cell", f"{shared_p95:.1%} at most", shared_p95 <= 0.1, ""
    alone, serving = ([each["alone"] for each in found if each["alone"]] for found in (beside, by_itself))
    text = f"beside a job {_p95_text(alone)}; where nothing trains {_p95_text(serving)}"
    why = _FEW.format(num=min(each["iterations"] for each in alone))
    yield name, "p95 10% alone, in each cell", text, all(each["p95"] <= 0.1 for each in (*alone, *serving)), why


def _p95_text(cells: Sequence[Result]) -> str:
    p95s = [each["p95"] for each in cells]
    return f"{sum(p95 <= 0.1 for p95 in p95s)} of {len(p95s)} cells, {max(p95s):.1%} at most"


def _planning_rows(files: Sequence[Path]) -> Iterator[tuple[str, str, str, bool, str]]:
    """Of each host."""
    texts = [path.read_text(encoding="utf-8") for path in files]
    for load, known, most_us in (("a plan", "records", 50), ("a plan", "models", 200), ("a prediction", "records", 5)):
        label = f"batch_ms, {known} " if load == "a prediction" else f"AdaptivePolicy, {known} "
        found = [float(match[1]) for text in texts if (match := re.search(rf"^{label} *p50 +([\d.]+) us", text, re.M))]
        if found:
            measured = ", ".join(f"{each:.1f}" for each in found) + " µs"
            yield f"the cost of {load}, by {known}", f"{most_us} µs", measured, max(found) <= most_us, _SLOW


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
