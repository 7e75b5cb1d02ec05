"""Policies compared over the grid of `cotenant bench colocate`, from its figures alone.

A place is a load, which may be a part of a trace, at a rate with a target: one cell for each policy. A policy meets the
SLO there if the share of requests that met both targets is at least ``slo_attainment``. Cells without requests say
nothing about it and are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SUBJECT = "adaptive"
BASELINES = ("chunked", "static")
REFERENCE = "inference-only"
SEPARATE = "separate"  # of bench/compare_sharing.py: it has two GPUs, so it is never the best other
TOLERANCE = 0.03
_NO_RIVALS = (SUBJECT, SEPARATE)
_ROUNDED = 1e-3
_ERRORS = ("mean", "share_above_10_percent")  # cells of an earlier version lack the second
_PLACE = (
    "load",
    "batch_size",
    "context",
    "num_tokens",
    "trace",
    "format",
    "time_scale",
    "window_s",
    "num_runs",
    "request_rate",
)

Report = Mapping[str, Any]
Cell = Mapping[str, Any]


def compare(report: Report, slo_attainment: float) -> dict[str, Any]:
    """``places``: what each policy did at each, and which was the best beside ``adaptive``, in tokens/s as if training
    alone came everywhere to the report's ``train_alone_tokens_per_s``. ``averages``: of these over the places where all
    policies that train were measured; 0 counts where the SLO is missed.
    ``ratios``: of ``adaptive``'s average to those of the best other policy, `chunked` and `static` (None: not in the
    run, or 0). ``misses``: places where ``adaptive`` misses an SLO that `inference-only` meets. ``behind``: where it
    is more than 3% slower than the best other that meets it. ``two_gpus``: see ``_two_gpus``. ``prediction``: the mean
    absolute errors and the share of iterations whose error is above 10%, over all cells, of `inference-only` and
    ``adaptive``. ``alone_tokens_per_s``: what training alone came to in each run that the report is put together
    from, if there are several, and behind them what counts for all."""
    policies = list(dict.fromkeys(cell["policy"] for cell in report["cells"]))
    alone = report["train_alone_tokens_per_s"]
    places = [_place(cells, slo_attainment, alone) for cells in by_place(report["cells"])]
    places = [place for place in places if place["policies"]]
    training = set(policies) - {REFERENCE}
    whole = [place for place in places if training <= place["policies"].keys()]
    averages = {policy: _average(policy, whole) for policy in policies}
    runs = [run["train_alone_tokens_per_s"] for run in report.get("runs") or []]
    return {
        "slo_attainment": slo_attainment,
        "alone_tokens_per_s": [*runs, alone] if len(runs) > 1 else [],
        "places": places,
        "num_whole_places": len(whole),
        "averages": averages,
        "ratios": _ratios(averages) if SUBJECT in averages else {},
        "misses": [place["place"] for place in places if _misses(place)],
        "behind": [place["place"] for place in places if _is_behind(place)],
        "two_gpus": _two_gpus(places, alone),
        "prediction": {policy: pooled_errors(policy, report["cells"]) for policy in (REFERENCE, SUBJECT)},
    }


def by_place(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The cells of each place, both in the order in which they were measured."""
    groups: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(place_key(cell), []).append(cell)
    return list(groups.values())


def place_key(cell: Cell) -> tuple[object, ...]:
    """The same for all cells of a place."""
    values = (window_s(cell) if name == "window_s" else cell.get(name) for name in _PLACE)
    return (*values, cell["slo"]["ttft_ms"], cell["slo"]["tpot_ms"])


def window_s(cell: Cell) -> tuple[float, float] | None:
    """Of a trace, from when to when; None: all of it. As JSON has it or not, it is the same."""
    window = cell.get("window_s")
    return None if window is None else (window[0], window[1])


def is_at(cell: Cell, place: Cell) -> bool:
    """Whether a cell is of this place of a comparison in the same file; earlier versions wrote places down without
    their windows, which the cells have."""
    return all(place[name] == cell.get(name) for name in (*_PLACE, "slo") if name in place)


def cell_key(cell: Cell) -> tuple[object, ...]:
    """The same for what is one cell: a policy at a place."""
    return (cell["policy"], *place_key(cell))


def meets_slo(cell: Cell, slo_attainment: float) -> bool:
    """False too where there were no requests."""
    return cell["attainment"] is not None and cell["attainment"] >= slo_attainment


def _tokens_per_s(cell: Cell, alone: float) -> float:
    """Where training by itself comes to ``alone``: a report may be put together from runs on several GPUs, of which
    none is just as fast as another. Another library's cells have a speed alone of their own, and stay as they are."""
    own, scaled = float(cell["train_tokens_per_s"]), float(cell["harvest"]) * alone
    # A harvest is rounded: what it comes to in the cell's own run is the cell's own speed.
    return own if "train_alone_tokens_per_s" in cell or abs(own - scaled) <= _ROUNDED * own else round(scaled, 2)


def _place(cells: Sequence[Cell], slo_attainment: float, alone: float) -> dict[str, Any]:
    policies = {
        cell["policy"]: {
            "train_tokens_per_s": _tokens_per_s(cell, alone),
            "harvest": cell["harvest"],
            "attainment": cell["attainment"],
            "meets_slo": meets_slo(cell, slo_attainment),
        }
        for cell in cells
        if cell["num_requests"]
    }
    others = [name for name, figures in policies.items() if name not in _NO_RIVALS and figures["meets_slo"]]
    best = max(others, key=lambda name: float(policies[name]["train_tokens_per_s"]), default=None)
    ratio = None
    if best is not None and SUBJECT in policies:
        ratio = _ratio(_counted(policies[SUBJECT]), policies[best]["train_tokens_per_s"])
    place = {name: cells[0][name] for name in (*_PLACE, "part", "slo") if name in cells[0]}
    return {"place": place, "policies": policies, "best_other": best, "ratio_to_best_other": ratio}


def _average(policy: str, places: Sequence[Mapping[str, Any]]) -> float | None:
    return round(sum(_counted(place["policies"].get(policy)) for place in places) / len(places), 2) if places else None


def _counted(figures: Mapping[str, Any] | None) -> float:
    """Tokens/s, 0 where the SLO is missed or nothing was measured."""
    return float(figures["train_tokens_per_s"]) if figures is not None and figures["meets_slo"] else 0.0


def _ratio(ours: float, theirs: float) -> float | None:
    return round(ours / theirs, 4) if theirs > 0 else None


def _ratios(averages: Mapping[str, float | None]) -> dict[str, dict[str, Any]]:
    measured = {name: value for name, value in averages.items() if value is not None}
    if SUBJECT not in measured:
        return {}
    others = {name: value for name, value in measured.items() if name not in _NO_RIVALS}
    best = max(others, key=lambda name: others[name], default=None)
    named = {"best_other": best, **{name: name if name in others else None for name in BASELINES}}
    return {
        key: {"policy": name, "ratio": None if name is None else _ratio(measured[SUBJECT], others[name])}
        for key, name in named.items()
    }


def pooled_errors(policy: str, cells: Sequence[Cell]) -> dict[str, dict[str, float]]:
    """Of prediction, over all cells of a policy: its batches' alone and with training, those that there were."""
    found = {}
    measured = [cell.get("prediction_error") or {} for cell in cells if cell["policy"] == policy]
    for kind in ("alone", "co_run"):
        errors = [each[kind] for each in measured if each.get(kind)]
        count = sum(each["iterations"] for each in errors)
        if count:
            names = [name for name in _ERRORS if all(name in each for each in errors)]
            means = {name: sum(each[name] * each["iterations"] for each in errors) / count for name in names}
            found[kind] = {**{name: round(value, 4) for name, value in means.items()}, "iterations": count}
    return found


def _misses(place: Mapping[str, Any]) -> bool:
    ours, reference = place["policies"].get(SUBJECT), place["policies"].get(REFERENCE)
    return bool(ours and reference and reference["meets_slo"] and not ours["meets_slo"])


def _is_behind(place: Mapping[str, Any]) -> bool:
    if place["best_other"] is None or SUBJECT not in place["policies"]:
        return False
    best = place["policies"][place["best_other"]]["train_tokens_per_s"]
    return bool(_counted(place["policies"][SUBJECT]) < best * (1 - TOLERANCE))


def _two_gpus(places: Sequence[Mapping[str, Any]], alone_tokens_per_s: float) -> list[dict[str, Any]]:
    """Two GPUs that each serve half of a trace's requests beside ``adaptive``'s training, against one that serves all
    and one that trains alone. The first comes from the trace at half the rate, so each cell of a trace at a rate tells
    of twice that rate. ``separate`` has measured the second: where it trains faster alone, its speed counts.
    ``separate_meets_slo``: whether `inference-only` meets the SLO at the whole rate, or ``separate`` does; None if
    neither was measured. Like everywhere, 0 tokens/s where the SLO is missed."""
    found = []
    for half in places:
        if half["place"]["load"] != "trace" or SUBJECT not in half["policies"]:
            continue
        whole = _at_twice(half["place"], places)
        measured = whole["policies"] if whole is not None else {}
        references = [measured[name] for name in (REFERENCE, SEPARATE) if name in measured]
        separate = max([alone_tokens_per_s, *(each["train_tokens_per_s"] for each in references)])
        colocated = 2 * _counted(half["policies"][SUBJECT])
        found.append(
            {
                "trace": half["place"].get("trace"),
                "time_scale": 2 * half["place"]["time_scale"],
                "slo": half["place"]["slo"],
                "colocated_tokens_per_s": round(colocated, 2),
                "separate_tokens_per_s": separate,
                "ratio": _ratio(colocated, separate),
                "separate_meets_slo": any(each["meets_slo"] for each in references) if references else None,
            }
        )
    return found


def _at_twice(half: Mapping[str, Any], places: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The same part of the trace at twice the rate; else, since of --cell-seconds more comes at a higher rate, one that
    begins where ``half`` does."""
    found = [place for place in places if _is_twice(half, place["place"])]
    same = (place for place in found if window_s(place["place"]) == window_s(half))
    return next(same, next(iter(found), None))


def _is_twice(half: Mapping[str, Any], place: Mapping[str, Any]) -> bool:
    return (
        all(place.get(name) == half.get(name) for name in ("load", "trace", "slo"))
        and place["time_scale"] == 2 * half["time_scale"]
        and (window_s(place) or (0.0,))[0] == (window_s(half) or (0.0,))[0]
    )
