"""The head of the page: what a job gets beside requests and what they notice of it, and where everything else is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from cotenant.bench.colocate_text import load_name
from cotenant.bench.comparison import REFERENCE, SUBJECT, is_at
from renderers.errors import spot
from renderers.text import Result, pair, table
from renderers.whole_grid import ATTAINMENT, NEWEST, whole_grid

_ABOVE = (
    "A LoRA job (rank 16, sequences of 2,048) beside Azure's conversation and code traces of 2023 on one H200, "
    "the shapes of Llama-3.1-8B in bf16, under `adaptive`, which is the default. Targets are TTFT 500 ms and the "
    "TPOT that each row names, for 99% of the requests. The job's speed is a share of what it has with the GPU to "
    "itself. Rows are the places where serving alone meets the SLO. Behind it: [the first half of "
    "them](#on-a-gpu-half-of-the-grid-by-a-later-version), [the conversation at other "
    "rates](#on-a-gpu-the-conversation-at-half-and-four-times-its-rate-by-a-later-version) and [the code trace at half "
    "its rate](#on-a-gpu-the-code-trace-at-half-its-rate-by-a-later-version), with the other policies and the "
    "commands. The last column is of [the newest version](#on-a-gpu-the-grids-places-by-the-newest-version), on "
    "another host."
)
_BELOW = (
    "Earlier versions were measured on an H100, whose memory has two thirds of the bandwidth: [most of the "
    "grid](#on-a-gpu-the-grid-on-an-h100-since-training-goes-on-beside-a-batch-when-somebody-comes) with fewer "
    "requests, and [one target of it](#on-a-gpu-one-target-of-the-grid-with-enough-requests-in-each-cell-for-a-p99) "
    "with as many. What bounds the job's speed: [the board's power](#on-a-gpu-steady-sequences-again), which both "
    "tenants share, prompts, which leave nothing unused, and [what reading the weights "
    "costs](#on-a-gpu-what-reading-the-weights-costs-in-energy). Where the time goes at each place, what a decode "
    "step costs the job, what would be left were that nothing, and clocks and power stand [in the grid's "
    "section](#on-a-gpu-the-grid-of-targets-rates-and-traces)."
)
_HEADER = (
    "load", "TPOT target, ms", "in time alone", "in time with a job", "TTFT p50 / p99 alone, ms", "with a job",
    "TPOT p50 / p99 alone, ms", "with a job", "the job's speed", "under the best other policy in time",
    "by the newest version",
)  # fmt: skip


def in_short(results: Path) -> list[str]:
    """The section of this name, if the grid that it tells of is among the ``results``."""
    whole, newest = whole_grid(results), results / NEWEST
    if whole is None or not newest.exists():
        return []
    return ["## In short", _ABOVE, _places(whole, json.loads(newest.read_text(encoding="utf-8"))), _BELOW]


def _places(result: Result, newest: Result) -> str:
    """A row for each place where serving alone meets the SLO: `inference-only` beside `adaptive`."""
    rows, speeds = [], {spot(cell): _speed(cell) for cell in newest["cells"] if cell["policy"] == SUBJECT}
    for place in sorted(result["comparison"]["places"], key=lambda each: _order(each["place"])):
        cells = {cell["policy"]: cell for cell in result["cells"] if is_at(cell, place["place"])}
        alone, ours = cells.get(REFERENCE), cells.get(SUBJECT)
        if alone is not None and ours is not None and place["policies"][REFERENCE]["meets_slo"]:
            rows.append([*_row(alone, ours, place), speeds.get(spot(ours), "-")])
    return table(_HEADER, rows)


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
    return [
        f"{load_name(alone)}, {alone['request_rate']:.1f} requests/s",
        f"{ours['slo']['tpot_ms']:g}",
        *(f"{cell['attainment']:.1%} of {cell['num_requests']}" for cell in (alone, ours)),
        *(text for texts in figures for text in texts),
        _speed(ours),
        "-" if best is None else f"`{best}` {place['policies'][best]['harvest']:.1%}",
    ]


def _speed(cell: Result) -> str:
    return f"**{cell['harvest']:.1%}**" if cell["attainment"] >= ATTAINMENT else f"{cell['harvest']:.1%}, too late"


def _latencies(cell: Result, name: str) -> str:
    figures = cell[name]
    return "-" if figures is None else pair(figures["p50"], figures["p99"])
