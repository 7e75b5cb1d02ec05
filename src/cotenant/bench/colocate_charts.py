"""The charts of `cotenant bench colocate`, from its figures: a policy looks the same in all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cotenant.bench.charts import Marker, Series, Style, area_chart, line_chart, style
from cotenant.bench.colocate_text import load_name, place_name, trace_name
from cotenant.bench.comparison import SUBJECT, by_place, meets_slo

Cell = Mapping[str, Any]

# In this order they have a style each, in whatever report; the grey one does not train.
_POLICIES = ("harli", "adaptive", "llmstation", "chunked", "static", "temporal", "inference-only", "fineinfer",
             "multitask", "lifecycle", "whole-step")  # fmt: skip
# Of tenants, not of policies: Paul Tol's "bright" scheme.
_ONLINE, _FUSED, _BEST_EFFORT = Style("#4477aa"), Style("#aa3377"), Style("#ccbb44")
_LATENCIES = (("ttft_ms", "Time to first token", "TTFT, ms"), ("tpot_ms", "Time per output token", "TPOT, ms"))


class ColocateCharts:
    """All charts of one run. Those that nothing was measured for are left out."""

    def __init__(self, cells: Sequence[Cell], slo_attainment: float, num_sms: int | None = None) -> None:
        self._cells = cells
        self._slo_attainment = slo_attainment
        self._num_sms = num_sms
        present = list(dict.fromkeys(cell["policy"] for cell in cells))
        others = [policy for policy in present if policy not in _POLICIES]
        self._styles = {policy: style(index) for index, policy in enumerate((*_POLICIES, *others))}
        self._policies = [policy for policy in self._styles if policy in present]

    def against_target(self) -> list[str]:
        """Training throughput against the TPOT target, a chart for each load."""
        return [
            self._throughput(f"{name}: training against the target", "TPOT target, ms", cells, _target)
            for name, cells in _grouped(self._cells, load_name)
        ]

    def against_rate(self) -> list[str]:
        """Training throughput against the rate of requests, a chart for each trace and target; where a trace ran at
        several rates."""
        traced = [cell for cell in self._cells if cell["load"] == "trace"]
        groups = _grouped(traced, lambda cell: f"{trace_name(cell)} at {_target(cell):g} ms")
        return [
            self._throughput(f"{name}: training against the load", "requests, 1/s", cells, _rate)
            for name, cells in groups
            if len({_rate(cell) for cell in cells}) > 1
        ]

    def distributions(self) -> list[tuple[str, list[str]]]:
        """Of each load by its name: the distributions of TTFT and TPOT at each target."""
        found = []
        for name, cells in _grouped(self._cells, load_name):
            charts = [self._distribution(place, latency) for place in by_place(cells) for latency in _LATENCIES]
            charts = [chart for chart in charts if chart]
            if charts:
                found.append((name, charts))
        return found

    def timelines(self) -> tuple[str, list[str]]:
        """One place and, for each policy there, who had the device and how long steps took: of the trace nearest to its
        own rate, else of the first load, the tightest target that ``adaptive`` meets, else the loosest."""
        cells = self._shown_place()
        unit, whole = ("SMs, on average", float(self._num_sms)) if self._num_sms else ("% of the device's time", 100.0)
        charts = []
        for cell in sorted(cells, key=lambda cell: self._policies.index(cell["policy"])):
            timeline = cell["timeline"]
            shares = [
                Series(name, [(x, y * whole) for x, y in zip(timeline["seconds"], timeline[key], strict=True)], look)
                for name, key, look in (
                    ("requests", "online_share", _ONLINE),
                    ("both in one batch", "fused_share", _FUSED),
                    ("training", "best_effort_share", _BEST_EFFORT),
                )
            ]
            charts.append(area_chart(f"{cell['policy']}: who has the device", "time, s", unit, shares, whole))
            charts.append(self._steps(cell))
        return (place_name(cells[0]) if cells else ""), charts

    def _throughput(self, title: str, x_label: str, cells: Sequence[Cell], x_of: Callable[[Cell], float]) -> str:
        series = []
        for policy in self._policies:
            ours = sorted((cell for cell in cells if cell["policy"] == policy), key=x_of)
            points = [(x_of(cell), float(cell["train_tokens_per_s"])) for cell in ours]
            marks = [meets_slo(cell, self._slo_attainment) for cell in ours]
            series.append(Series(policy, points, self._styles[policy], marks))
        return line_chart(title, x_label, "training, tokens/s", series)

    def _distribution(self, cells: Sequence[Cell], latency: tuple[str, str, str]) -> str:
        key, title, label = latency
        series = []
        for cell in sorted(cells, key=lambda cell: self._policies.index(cell["policy"])):
            values = (cell.get("cdf") or {}).get(key) or ()
            points = [(max(value, 1e-3), float(share)) for share, value in enumerate(values)]
            series.append(Series(cell["policy"], points, self._styles[cell["policy"]]))
        if not any(line.points for line in series):
            return ""
        target = Marker(cells[0]["slo"][key], "target")
        return line_chart(f"{title}, {place_name(cells[0])}", label, "% of requests", series, [target], log_x=True)

    def _steps(self, cell: Cell) -> str:
        timeline, look = cell["timeline"], self._styles[cell["policy"]]

        def line(name: str, key: str, look: Style) -> Series:
            pairs = zip(timeline["seconds"], timeline[key], strict=True)
            return Series(name, [(x, math.nan if y is None else y) for x, y in pairs], look)

        longest = line("longest", "longest_step_ms", Style("#808080", "2 3"))
        mean = line("mean", "step_ms", Style(look.color))
        target = Marker(_target(cell), "TPOT target", level=True)
        return line_chart(f"{cell['policy']}: steps of the batch", "time, s", "step, ms", [longest, mean], [target])

    def _shown_place(self) -> list[Cell]:
        cells = [cell for cell in self._cells if cell.get("timeline")]
        if not cells:
            return []
        own_rate = min(cells, key=lambda cell: abs(cell["time_scale"] - 1) if cell["load"] == "trace" else float("inf"))
        places = by_place([cell for cell in cells if load_name(cell) == load_name(own_rate)])
        places.sort(key=lambda place: _target(place[0]))
        for place in places:
            if any(cell["policy"] == SUBJECT and meets_slo(cell, self._slo_attainment) for cell in place):
                return place
        return places[-1]


def _target(cell: Cell) -> float:
    return float(cell["slo"]["tpot_ms"])


def _rate(cell: Cell) -> float:
    return float(cell.get("request_rate") or cell["num_requests"] / cell["duration_s"])


def _grouped(cells: Sequence[Cell], name_of: Callable[[Cell], str]) -> list[tuple[str, list[Cell]]]:
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(name_of(cell), []).append(cell)
    return list(groups.items())
