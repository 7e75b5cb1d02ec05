"""The head of the page: what a job gets beside requests and what they notice of it, and where everything else is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from cotenant.bench.colocate_text import load_name
from cotenant.bench.comparison import REFERENCE, SUBJECT, place_key
from renderers.text import Result, pair, table

_GRID = "colocate_grid_h200.json"
_ABOVE = (
    "A LoRA job (rank 16, sequences of 2,048) beside Azure's conversation and code traces of 2023 on one H200, "
    "the shapes of Llama-3.1-8B in bf16, under `adaptive`, which is the default. Targets are TTFT 500 ms and the "
    "TPOT that each row names, for 99% of the requests. The job's speed is a share of what it has with the GPU to "
    "itself. Rows are the places where serving alone meets the SLO. Behind it: [the "
    "grid](#on-a-gpu-the-grid-of-targets-rates-and-traces), with the other policies and the command."
)
_BELOW = (
    "Earlier versions were measured on an H100, whose memory has two thirds of the bandwidth: [most of the "
    "grid](#on-a-gpu-the-grid-on-an-h100-since-training-goes-on-beside-a-batch-when-somebody-comes) with fewer "
    "requests, and [one target of it](#on-a-gpu-one-target-of-the-grid-with-enough-requests-in-each-cell-for-a-p99) "
    "with as many. What bounds the job's speed: [the board's power](#on-a-gpu-steady-sequences-again), "
    "which both tenants share, prompts, which leave nothing unused, and [what reading the weights "
    "costs](#on-a-gpu-what-reading-the-weights-costs-in-energy)."
)
_BOUNDS_TITLE = "What bounds the job's speed"
_BOUNDS = (
    "Of the same places, as far as all three policies were measured, what of the time goes where. Batches with "
    "prompts leave nothing unused. The board is at its power limit whenever a job runs, so the clock falls for both "
    "tenants; that, and smaller chunks where training has spent what requests were ahead, makes these batches take "
    "more of the time than without a job. Decode steps at the pace of the target, one by one with all SMs, as "
    "`llmstation` runs them, take a share; what is left then would be the speed of a job that has the GPU in turns "
    "and loses nothing. Beside steps in partitions a job gets on, but draws power that the steps and the prompts "
    "lack: `adaptive` has up to 6 points more than that at tight targets, less at loose ones, and at 40 ms and twice "
    "the rate none. Were steps to cost nothing at all, what prompts leave when serving alone would be the job's."
)
_BOUNDS_HEADER = (
    "load", "TPOT target, ms", "batches with prompts alone", "with a job", "decode steps in turns", "left in turns",
    "the job's speed", "were steps free", "SM clock alone, MHz", "with a job", "at the power limit",
)  # fmt: skip
_TURNS = "llmstation"
_HEADER = (
    "load", "TPOT target, ms", "in time alone", "in time with a job", "TTFT p50 / p99 alone, ms", "with a job",
    "TPOT p50 / p99 alone, ms", "with a job", "the job's speed", "under the best other policy in time",
)  # fmt: skip


def in_short(results: Path) -> list[str]:
    """The section of this name and that of what bounds it, if the grid that they tell of is among the ``results``."""
    if not (path := results / _GRID).exists():
        return []
    grid = json.loads(path.read_text(encoding="utf-8"))
    bounds = _bounds(grid)
    parts = ["## In short", _ABOVE, _places(grid), _BELOW]
    return [*parts, f"## {_BOUNDS_TITLE}", _BOUNDS, table(_BOUNDS_HEADER, bounds)] if bounds else parts


def _places(result: Result) -> str:
    """A row for each place where serving alone meets the SLO: `inference-only` beside `adaptive`."""
    cells = {(place_key(cell), cell["policy"]): cell for cell in result["cells"]}
    rows = []
    for place in sorted(result["comparison"]["places"], key=lambda each: _order(each["place"])):
        alone, ours = (cells.get((place_key(place["place"]), policy)) for policy in (REFERENCE, SUBJECT))
        if alone is not None and ours is not None and place["policies"][REFERENCE]["meets_slo"]:
            rows.append(_row(alone, ours, place))
    return table(_HEADER, rows)


def _bounds(result: Result) -> list[list[str]]:
    """A row for each place where serving alone meets the SLO: where the time goes, alone, in turns and shared."""
    cells = {(place_key(cell), cell["policy"]): cell for cell in result["cells"] if _has_profile(cell)}
    rows = []
    for place in sorted(result["comparison"]["places"], key=lambda each: _order(each["place"])):
        found = [cells.get((place_key(place["place"]), policy)) for policy in (REFERENCE, SUBJECT, _TURNS)]
        if place["policies"][REFERENCE]["meets_slo"] and None not in found:
            rows.append(_bound(*(cell for cell in found if cell is not None)))
    return rows


def _has_profile(cell: Result) -> bool:
    return bool(cell.get("device_time") and cell.get("utilisation"))


def _bound(alone: Result, ours: Result, turns: Result) -> list[str]:
    prompts, steps = turns["device_time"]["prompts_alone"], turns["device_time"]["decode_alone"]
    shares = [alone["device_time"]["prompts_alone"], ours["device_time"]["prompts_alone"], steps, 1.0 - prompts - steps]
    return [
        load_name(alone),
        f"{ours['slo']['tpot_ms']:g}",
        *(f"{share:.1%}" for share in shares),
        f"**{ours['harvest']:.1%}**",
        f"{1.0 - alone['device_time']['prompts_alone']:.1%}",
        *(f"{cell['utilisation']['sm_clock_mhz']:,.0f}" for cell in (alone, ours)),
        f"{ours['utilisation']['power_limited']:.0%}",
    ]


def contents(titles: Sequence[str]) -> str:
    """A link to each heading."""
    return "\n".join(f"- [{title}](#{anchor(title)})" for title in titles)


def anchor(title: str) -> str:
    """Of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _order(place: Mapping[str, object]) -> tuple[object, ...]:
    slo = place["slo"]
    assert isinstance(slo, Mapping)
    return (place["trace"] != "conv", place["trace"], place["time_scale"], slo["tpot_ms"])


def _row(alone: Result, ours: Result, place: Result) -> list[str]:
    best = None if place["best_other"] == REFERENCE else place["best_other"]
    figures = [(_latencies(alone, name), _latencies(ours, name)) for name in ("ttft_ms", "tpot_ms")]
    speed = f"{ours['harvest']:.1%}"
    return [
        f"{load_name(alone)}, {alone['request_rate']:.1f} requests/s",
        f"{ours['slo']['tpot_ms']:g}",
        *(f"{cell['attainment']:.1%} of {cell['num_requests']}" for cell in (alone, ours)),
        *(text for texts in figures for text in texts),
        f"**{speed}**" if place["policies"][SUBJECT]["meets_slo"] else f"{speed}, too late",
        "-" if best is None else f"`{best}` {place['policies'][best]['harvest']:.1%}",
    ]


def _latencies(cell: Result, name: str) -> str:
    figures = cell[name]
    return "-" if figures is None else pair(figures["p50"], figures["p99"])
