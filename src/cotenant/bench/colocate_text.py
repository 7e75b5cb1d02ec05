"""The figures of `cotenant bench colocate` in words: names of loads, cells of tables, what the comparison says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from cotenant.bench.comparison import BASELINES, REFERENCE, SEPARATE, SUBJECT, TOLERANCE, window_s

_MOST_HARVEST = 1.01  # a little more may be the timing
HEADER = ("load", "TPOT target", "policy", "tokens/s", "harvest", "attainment", "TTFT p50/p99", "TPOT", "ITL")

Cell = Mapping[str, Any]


def load_name(cell: Cell) -> str:
    """A load in a few words."""
    if cell["load"] == "steady":
        return _with_part(f"{cell['batch_size']} x {cell['context']}", cell)
    return f"{trace_name(cell)} x {cell['time_scale']:g}"


def trace_name(cell: Cell) -> str:
    """Of a trace, with its part where there are others (``with_parts``)."""
    return _with_part(str(cell.get("trace") or cell["format"]), cell)


def _with_part(name: str, cell: Cell) -> str:
    return f"{name} ({cell['part']})" if cell.get("part") else name


def with_parts(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The cells; where several parts of a trace are among them, or several targets for TTFT, each with its ``part`` in
    words, which names then have. A window that is longer at a higher rate (--cell-seconds) is no other part."""
    begins: defaultdict[object, set[float]] = defaultdict(set)
    ends: defaultdict[object, set[float | None]] = defaultdict(set)
    for cell in cells:
        trace, begin_s, end_s = _part(cell)
        begins[trace].add(begin_s)
        ends[trace, begin_s, cell.get("time_scale")].add(end_s)
    has_ttfts = len({cell["slo"]["ttft_ms"] for cell in cells}) > 1
    named = []
    for cell in cells:
        trace, begin_s, end_s = _part(cell)
        has_longer = len(ends[trace, begin_s, cell.get("time_scale")]) > 1
        text = f"from {begin_s:g} s" if not has_longer or end_s is None else f"{begin_s:g} to {end_s:g} s"
        parts = [text] if has_longer or len(begins[trace]) > 1 else []
        parts += [f"TTFT {cell['slo']['ttft_ms']:g} ms"] if has_ttfts else []
        part = {"part": ", ".join(parts)} if parts else {}
        named.append({**{name: value for name, value in cell.items() if name != "part"}, **part})
    return named


def _part(cell: Cell) -> tuple[object, float, float | None]:
    """Of which trace, from when, and to when; None: to its end. Steady loads have one part."""
    begin_s, end_s = window_s(cell) or (0.0, None)
    return (cell["load"], cell.get("trace")), begin_s, end_s


def table_row(cell: Cell) -> list[str]:
    """A cell under ``HEADER``; latencies in milliseconds, a dash for what was not measured or cannot be stated."""
    return [
        load_name(cell),
        f"{cell['slo']['tpot_ms']:g}",
        cell["policy"],
        f"{cell['train_tokens_per_s']:.0f}",
        harvest_text(cell),
        attainment_text(cell),
        *(_pair(cell[name]) for name in ("ttft_ms", "tpot_ms", "itl_ms")),
    ]


def harvest_text(cell: Cell) -> str:
    """Of several runs with the least and the most."""
    runs = cell.get("harvest_of_runs")
    spread = f" ({min(runs):.1%} to {max(runs):.1%})" if runs and max(runs) > 0 else ""
    return f"{cell['harvest']:.1%}{spread}"


def attainment_text(cell: Cell) -> str:
    """Of several runs with the least and the most, if they differ."""
    runs = cell.get("attainment_of_runs")
    spread = f" ({min(runs):.1%} to {max(runs):.1%})" if runs and min(runs) < max(runs) else ""
    return f"{_share(cell['attainment'])}{spread}"


def line(cell: Cell) -> str:
    """The same in a line."""
    load, tpot_ms, policy, speed, harvest, attainment, ttft, tpot, itl = table_row(cell)
    return (
        f"{load}, TPOT target {tpot_ms} ms, {policy}: {speed} tokens/s, harvest {harvest}, attainment {attainment}, "
        f"TTFT {ttft}, TPOT {tpot}, ITL {itl} ms"
    )


def place_name(place: Mapping[str, Any]) -> str:
    """A load, its rate and its target."""
    return f"{load_name(place)} at {place['slo']['tpot_ms']:g} ms"


def comparison_lines(comparison: Mapping[str, Any]) -> list[str]:
    """What the comparison says, a sentence each."""
    num_places, attainment = len(comparison["places"]), comparison["slo_attainment"]
    lines = [
        f"The SLO is met where at least {attainment:.4g} of the requests met both targets. Averages are over "
        f"{comparison['num_whole_places']} of {num_places} places (load, rate and target), those where every policy "
        "that trains was measured; a place where a policy misses the SLO counts as 0 for it."
    ]
    *runs, alone = comparison.get("alone_tokens_per_s") or [None]  # a report of an earlier version has none
    if runs:
        speeds = ", ".join(f"{speed:,.0f}" for speed in runs)
        lines.append(
            f"Training alone came to {speeds} tokens/s in the runs that this is put together from; averages are as if "
            f"it had come to their mean, {alone:,.0f}, in each."
        )
    policies = [item for place in comparison["places"] for item in place["policies"].items()]
    harvests = [figures["harvest"] for name, figures in policies if name != SEPARATE]  # it trains on a GPU of its own
    if max(harvests, default=0.0) > _MOST_HARVEST:
        lines.append(
            f"A harvest of {max(harvests):.1%} is no gain: training alone was timed while the machine was slower, or "
            "for too short a time (--alone-seconds). So all harvests are too high, and what is said of two GPUs."
        )
    if SEPARATE in comparison["averages"]:
        lines.append(f"`{SEPARATE}` has two GPUs and is left out where the best other policy is named.")
    if SUBJECT not in comparison["averages"]:
        return lines
    lines += _ratio_lines(comparison["ratios"])
    measured = set(comparison["averages"])
    if REFERENCE in measured:
        lines.append(_places_line(f"{SUBJECT} misses an SLO that {REFERENCE} meets", comparison["misses"]))
    if measured - {SUBJECT, REFERENCE, SEPARATE}:
        about = f"{SUBJECT} is more than {TOLERANCE:.0%} behind the best other"
        lines.append(_places_line(about, comparison["behind"]))
    lines += _prediction_lines(comparison.get("prediction", {}))
    return lines + _two_gpus_lines(comparison["two_gpus"])


def _prediction_lines(policies: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """``policies``: see ``compare``; a report of an earlier version has none."""
    names = {"alone": "alone", "co_run": "with training"}
    parts = [
        f"{policy} {names[kind]} {errors['mean']:.1%} of {errors['iterations']}{_above_text(errors)}"
        for policy, kinds in policies.items()
        for kind, errors in kinds.items()
    ]
    return [f"Mean error of prediction, over all iterations: {', '.join(parts)}."] if parts else []


def _above_text(errors: Mapping[str, float]) -> str:
    share = errors.get("share_above_10_percent")
    return "" if share is None else f" ({share:.1%} of them above 10%)"


def _ratio_lines(ratios: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = []
    for key in ("best_other", *BASELINES):
        entry = ratios.get(key)
        if entry is None or entry["policy"] is None:
            continue
        name = f"the best other policy, {entry['policy']}" if key == "best_other" else entry["policy"]
        ratio = "no ratio, that one is 0" if entry["ratio"] is None else f"{entry['ratio']:.2f} times"
        lines.append(f"{SUBJECT} on average against {name}: {ratio}.")
    return lines


def _places_line(text: str, places: Sequence[Mapping[str, Any]]) -> str:
    return f"Places where {text}: {'; '.join(map(place_name, places)) if places else 'none'}."


def _two_gpus_lines(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """One for each rate, over traces and targets."""
    lines = []
    for time_scale in sorted({entry["time_scale"] for entry in entries}):
        ours = [entry for entry in entries if entry["time_scale"] == time_scale and entry["ratio"] is not None]
        if not ours:
            continue
        ratios = [entry["ratio"] for entry in ours]
        num_missed = sum(entry["separate_meets_slo"] is False for entry in ours)
        note = f" (which misses the SLO by itself in {num_missed} of {len(ours)} places)" if num_missed else ""
        spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
        lines.append(
            f"Two GPUs under a trace at {time_scale:g} times its rate, both with {SUBJECT}, against one that "
            f"serves{note} and one that trains: {sum(ratios) / len(ratios):.2f} times the training throughput{spread}."
        )
    return lines


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _pair(latency: Mapping[str, float | None] | None) -> str:
    if latency is None:
        return "-"
    p50, p99 = latency["p50"], latency["p99"]
    return f"{p50:.1f}/{'-' if p99 is None else format(p99, '.1f')}"
