"""What a board draws, and at which clocks its SMs run for that, from the figures of `cotenant bench colocate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cotenant.bench.colocate_text import place_name
from cotenant.bench.comparison import REFERENCE, SUBJECT, by_place

HEADER = ("", "policy", "power, W", "limit, W", "time held down by it", "SM clock, MHz")
NOTE = (
    "What the board draws on average, beside its limit, in which share of the time that limit holds the clocks down, "
    "and the clock of the SMs, all of which share what the limit leaves."
)


def power_rows(report: Mapping[str, Any]) -> list[list[str]]:
    """Under ``HEADER``: training alone, but of reports of several runs, then each place as served alone and as shared
    by `adaptive`; those that were read."""
    alone = None if report.get("runs") else report.get("train_alone_utilisation")
    found = [("training alone", "-", alone)]
    for place in by_place(report["cells"]):
        found += [
            (place_name(cell), cell["policy"], cell.get("utilisation"))
            for cell in place
            if cell["policy"] in (REFERENCE, SUBJECT)
        ]
    return [[name, policy, *_figures(read)] for name, policy, read in found if read and "power_w" in read]


def _figures(read: Mapping[str, float]) -> list[str]:
    return [
        f"{read['power_w']:.0f}",
        f"{read['power_limit_w']:.0f}",
        f"{read['power_limited']:.0%}",
        f"{read['sm_clock_mhz']:,.0f}",
    ]
