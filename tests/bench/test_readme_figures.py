"""What the README says of a GPU is what the newest grid's results have."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
GRID = json.loads((ROOT / "bench" / "results" / "colocate_newest_h200.json").read_text(encoding="utf-8"))
CELLS = {(cell["trace"], cell["time_scale"], cell["slo"]["tpot_ms"], cell["policy"]): cell for cell in GRID["cells"]}


def pair(alone: dict[str, Any], ours: dict[str, Any], name: str, text: Callable[[float], str]) -> list[str]:
    return [
        f"{text(alone[name]['p50'])}, {text(alone[name]['p99'])} ms",
        f"{text(ours[name]['p50'])}, {text(ours[name]['p99'])} ms",
    ]


def harvests(trace: str, time_scale: float | None) -> list[float]:
    """Of `adaptive` where it was measured: where serving alone is in time."""
    return [
        cell["harvest"]
        for (of_trace, scale, _, policy), cell in CELLS.items()
        if (of_trace, policy) == (trace, "adaptive") and time_scale in (None, scale)
    ]


def between(values: list[float]) -> str:
    return f"{100 * min(values):.0f} to {100 * max(values):.0f}%"


def test_the_table_is_the_conversation_at_its_own_rate() -> None:
    for target in (40.0, 25.0, 15.0, 10.0):
        alone, ours = (CELLS["conv", 1.0, target, policy] for policy in ("inference-only", "adaptive"))
        row = [
            f"{target:g} ms",
            f"{round(ours['attainment'] * ours['num_requests'])} of {ours['num_requests']}",
            *pair(alone, ours, "ttft_ms", lambda ms: f"{ms + 1e-6:.0f}"),  # halves up
            *pair(alone, ours, "tpot_ms", "{:.1f}".format),
            f"{ours['harvest']:.0%}",
        ]
        assert f"| {' | '.join(row)} |" in README
    assert f"{CELLS['conv', 1.0, 40.0, 'adaptive']['request_rate']:.1f} requests/s" in README


def test_the_text_is_the_whole_grid() -> None:
    half, twice, code = harvests("conv", 0.5), harvests("conv", 2.0), harvests("code", None)
    assert f"At half that rate it is {between(half)}, at twice {between(twice)}, and in the code trace" in README
    assert f"come in bursts, {between(code)}." in README
    (at_four_times,) = harvests("conv", 4.0)
    assert f"a job gets {at_four_times:.0%} there at 40 ms" in README


@pytest.mark.parametrize(
    ("aim", "told"),
    [
        (
            r"in time at all places \| ((\d+) of \2) \[in the newest grid\]",
            "In each of the {2} places (of two traces, four rates and four targets) where serving alone meets",
        ),
        (
            r"on average 1\.38 times `chunked` \| ([\d.]+) \[in the newest grid\]",
            "Over these it trains {1} times as much as a job that is cut into equal chunks",
        ),
        (
            r"on average 1\.15 times the best other \| ([\d.]+), `\w+`, \[in the grid's places, on three hosts\]",
            "was in time at all 24, too, and trained {1} times as much as the best other;",
        ),
        (
            r"on average 1\.15 times the best other \| .*?\*\*([\d.]+), `\w+`, of (\d+) places\*\* \[in the grid again",
            "and over {2} it trained {1} times as much as the best other.",
        ),
        (
            r"in time at all places \| .*?\*\*17 of (19)\*\* \[in the grid again\]",
            "was late in 2 of {1},",
        ),
        (
            r"in time at all places \| .*?; (24) of 24 \[in the grid's places, on three hosts\]",
            "was in time at all {1}, too,",
        ),
    ],
)
def test_the_text_is_what_was_aimed_at(aim: str, told: str) -> None:
    """As docs/benchmarks.md has it, which is made of the results."""
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    found = re.search(rf"^\| the grid, where serving alone is in time \| {aim}", page, re.MULTILINE)
    assert found
    assert told.format("", *found.groups()) in README
