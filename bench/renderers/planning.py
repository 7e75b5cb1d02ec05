"""What planning was to cost, and what it does, of the committed results."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from renderers.target import Measured, Target

# By versions, the newest last.
_PLANNING = (
    "planner_h200.txt",
    "planner_slow_h200.txt",
    "planner_later_h200.txt",
    "planner_leaner_h200.txt",
    "planner_rounds_h200.txt",
    "planner_rounds_again_h200.txt",
    "planner_objects_h200.txt",
    "planner_turns_h200.txt",
    "planner_found_h200.txt",
    "planner_heap_h200.txt",
)
_PROFILE, _PROFILE_S = "profile_h200.txt", 180  # measured by an earlier version
_ALL_OF_IT = "AdaptivePolicy, records, all of it for 64 prompts"
_PARTS = ("AdaptivePolicy, records", "prompt_budget, records", "take_turns, records")
# (what, the calls that it takes, or others where these were not measured, what was aimed at in microseconds)
_PLANNING_ROWS: tuple[tuple[str, tuple[tuple[str, ...], ...], float], ...] = (
    ("a plan, by records", (_PARTS[:1],), 50),
    (
        "a plan where 64 prompts wait, with their chunk's size and turns, by records",
        ((_ALL_OF_IT,), _PARTS),
        50,
    ),
    ("a plan, by models", (("AdaptivePolicy, models",),), 200),
    ("predicting a decode step, by records", (("batch_ms, records",),), 5),
    ("predicting a batch with prompts", (("batch_ms of prompts, records",),), 5),
)
_SLOW = (
    "Hosts differ by two times, and so do seconds of one, where others have a core's twin. It is spent while the "
    "device has a batch in flight. Less Python in what is asked, or a language that is compiled."
)


def planning_rows(results: Path) -> Iterator[Target]:
    """As far as files of them are there."""
    yield from _cost_rows([results / name for name in _PLANNING if (results / name).exists()])
    yield from _profile_rows(results / _PROFILE)


def _profile_rows(path: Path) -> Iterator[Target]:
    found = re.search(r"latencies in (\d+) s", path.read_text(encoding="utf-8")) if path.exists() else None
    if found is not None:
        measured = Measured(f"{found[1]} s, an earlier version", int(found[1]) <= _PROFILE_S)
        yield Target("`cotenant profile`", f"{_PROFILE_S} s", [measured])


def _cost_rows(files: Sequence[Path]) -> Iterator[Target]:
    """By versions, each on another host."""
    texts = [path.read_text(encoding="utf-8") for path in files]
    for load, ways, most_us in _PLANNING_ROWS:
        found = [us for text in texts if (us := _cost_us(text, ways)) is not None]
        if found:
            versions = [Measured(f"{us:.1f}", us <= most_us, _SLOW) for us in found]
            versions[-1] = versions[-1]._replace(text=f"{found[-1]:.1f} µs{_rounds(texts[-1], ways[0])}")
            yield Target(f"the cost of {load}", f"{most_us} µs", versions)


def _cost_us(text: str, ways: Sequence[Sequence[str]]) -> float | None:
    """Of a host; what several calls take is their sum."""
    for labels in ways:
        each = [_median_us(text, label) for label in labels]
        if None not in each:
            return sum(us for us in each if us is not None)
    return None


def _median_us(text: str, label: str) -> float | None:
    match = re.search(rf"^{label} *p50 +([\d.]+) us", text, re.M)
    return None if match is None else float(match[1])


def _rounds(text: str, labels: Sequence[str]) -> str:
    match = re.search(rf"^{labels[0]} *p50.*, rounds ([\d.]+) to ([\d.]+) us", text, re.M)
    return "" if match is None else f", {float(match[1]):.1f} to {float(match[2]):.1f} in rounds"
