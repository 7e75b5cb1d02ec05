"""What the README says of a GPU is what the grid's results have."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
README = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
GRID = json.loads((ROOT / "bench" / "results" / "colocate_grid_h200.json").read_text(encoding="utf-8"))
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
    comparison = GRID["comparison"]
    half, twice, code = harvests("conv", 0.5), harvests("conv", 2.0), harvests("code", None)
    assert f"At half that rate it is {between(half)}, at twice {between(twice)}, and in the code trace" in README
    assert f"come in bursts, {between(code)}." in README
    (at_four_times,) = harvests("conv", 4.0)
    assert f"a job gets {at_four_times:.0%} there at 40 ms" in README
    alone_in_time = [place for place in comparison["places"] if place["policies"]["inference-only"]["meets_slo"]]
    assert f"In each of the {len(alone_in_time)} places" in README
    assert not comparison["misses"]
    ratio = comparison["ratios"]["best_other"]["ratio"]
    assert f"it trains {ratio:.2f} times as much as the best other way" in README
    ratios = [place["ratio_to_best_other"] or 0 for place in alone_in_time]
    behind = [ratio for ratio in ratios if ratio < 1]
    assert len(behind) == 1, "which the README says"
    assert f"in {len(ratios) - 1} of them it trains most" in README
    assert f"in one another way got {1 / min(behind) - 1:.1%} further" in README


def test_the_text_is_the_grid_again() -> None:
    """As docs/benchmarks.md has it, which is made of the results."""
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    in_time = re.search(r"^\| \[the same again\].*? \| in time at all (\d+) places \| (\d+) \|", page, re.MULTILINE)
    ratio = re.search(
        r"^\| \[the same again\].*? times the best other, `llmstation` \| ([\d.]+), of (\d+) places", page, re.MULTILINE
    )
    assert in_time
    assert ratio
    late = int(in_time[1]) - int(in_time[2])
    assert f"it was late in {late} of {in_time[1]} of these places" in README
    assert f"over {ratio[2]} it trained {ratio[1]} times as much as the best other." in README


def test_the_text_is_the_grid_by_later_versions() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    row = r"^\| \[these places by later versions\].*? \| "
    in_time = re.search(row + r"in time at all (\d+) places \| (\d+) \|", page, re.MULTILINE)
    ratio = re.search(row + r"on average 1.15 times the best other, `\w+` \| ([\d.]+) \|", page, re.MULTILINE)
    assert in_time
    assert ratio
    assert in_time[1] == in_time[2], "which the README says"
    later = f"at all {in_time[1]} places, were late at none, and trained {ratio[1]} times as much as the best other."
    assert later in README
    between = json.loads((ROOT / "bench" / "results" / "colocate_between_h200.json").read_text(encoding="utf-8"))
    comparison = between["comparison"]
    assert len(comparison["places"]) == int(in_time[1])
    assert not comparison["misses"]
    best = comparison["ratios"]["best_other"]["ratio"]
    assert f"it was late at none, either, and trained {best:.2f} times as much as the best of these." in README
