"""What a board draws, at which clocks its SMs run for that, and how busy they are, by `cotenant bench colocate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cotenant.bench.colocate_text import place_name
from cotenant.bench.comparison import REFERENCE, SUBJECT, by_place

_HEADER = ("", "policy", "power, W", "limit, W", "time held down by it", "SM clock, MHz")
_COUNTED = {"busy_sms": "SMs busy", "bandwidth": "bandwidth used"}  # by what some GPUs count of themselves
NOTE = (
    "What the board draws on average, beside its limit, in which share of the time that limit holds the clocks down, "
    "and the clock of the SMs, all of which share what the limit leaves. Where the GPU counts them, the share of the "
    "SMs that ran something, and that of the memory's bandwidth that was used."
)


def power_table(report: Mapping[str, Any]) -> tuple[Sequence[str], list[list[str]]]:
    """Its header and its rows: training alone, but of reports of several runs, then each place as served alone and as
    shared by `adaptive`; those that were read."""
    alone = None if report.get("runs") else report.get("train_alone_utilisation")
    found = [("training alone", "-", alone)]
    for place in by_place(report["cells"]):
        found += [
            (place_name(cell), cell["policy"], cell.get("utilisation"))
            for cell in place
            if cell["policy"] in (REFERENCE, SUBJECT)
        ]
    shown = [(name, policy, read) for name, policy, read in found if read and "power_w" in read]
    counted = [name for name in _COUNTED if any(name in read for _, _, read in shown)]
    rows = [[name, policy, *_figures(read), *_shares(read, counted)] for name, policy, read in shown]
    return (*_HEADER, *(_COUNTED[name] for name in counted)), rows


def _figures(read: Mapping[str, float]) -> list[str]:
    return [
        f"{read['power_w']:.0f}",
        f"{read['power_limit_w']:.0f}",
        f"{read['power_limited']:.0%}",
        f"{read['sm_clock_mhz']:,.0f}",
    ]


def _shares(read: Mapping[str, float], names: Sequence[str]) -> list[str]:
    return [f"{read[name]:.0%}" if name in read else "-" for name in names]
