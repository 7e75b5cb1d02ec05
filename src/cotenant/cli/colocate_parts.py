"""Runs of `cotenant bench colocate` that become one: what was cut off and goes on, and parts of one grid."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cotenant.bench.comparison import by_place, cell_key
from cotenant.core.errors import InvalidInputError

KIND = "colocate"
_SAME = (
    "model",
    "load_format",
    "dtype",
    "compressed",
    "device",
    "num_sms",
    "training",
    "slo_attainment",
    "slo_itl_ms",
    "fuse",
    "versions",
)

# The same, where both say it (earlier versions did not): which requests of a trace there are, and how much is known
# before they come.
_SAME_IF_KNOWN = ("max_model_len", "learning_seconds")

# What has to be the same in a run that goes on, of the report and of its "training", by how a person sets it. Earlier
# versions did not write all of it down. Rounds: policies that are compared were measured in turn.
_FLAGS = {
    "model": "MODEL",
    "load_format": "--load-format",
    "dtype": "--dtype",
    "compressed": "--compress-weights",
    "seq_len": "--seq-len",
    "tokens_per_step": "--tokens-per-step",
    "tasklet_tokens": "--tasklet-tokens",
    "r": "--r",
    "slo_attainment": "--slo-attainment",
    "slo_itl_ms": "--slo-itl-ms",
    "fuse": "--fuse",
    "max_model_len": "--max-model-len",
    "learning_seconds": "--learning-seconds",
    "rounds": "--rounds",
}

_NEEDED: dict[str, tuple[type, ...]] = {"command": (str,), "train_alone_tokens_per_s": (int, float), "cells": (list,)}
_NEEDED_OF_CELLS = (
    "load",
    "policy",
    "slo",
    "num_requests",
    "attainment",
    "train_tokens_per_s",
    "harvest",
    "ttft_ms",
    "tpot_ms",
    "itl_ms",
)

Report = dict[str, Any]


def read_report(path: Path) -> Report:
    """What `cotenant bench colocate --json` has written. Raises InvalidInputError."""
    is_none = f"{path} is not what `cotenant bench colocate --json` writes"
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error}", param="file") from error
    except ValueError as error:
        raise InvalidInputError(f"{is_none}: {error}", param="file") from error
    if not isinstance(report, dict) or report.get("kind") != KIND:
        raise InvalidInputError(is_none, param="file")
    for name, kinds in _NEEDED.items():
        if not isinstance(report.get(name), kinds):
            raise InvalidInputError(f"{is_none}: it has no {name}, or another kind of it", param="file")
    for number, cell in enumerate(report["cells"]):
        lacking = [name for name in _NEEDED_OF_CELLS if name not in cell] if isinstance(cell, dict) else ["fields"]
        if lacking:
            raise InvalidInputError(f"{is_none}: its cell {number} has no {lacking[0]}", param="file")
        slo = cell["slo"] if isinstance(cell["slo"], dict) else {}
        if not all(isinstance(slo.get(name), int | float) for name in ("ttft_ms", "tpot_ms")):
            raise InvalidInputError(f"{is_none}: its cell {number} has no targets of numbers", param="file")
    # Earlier versions did not write these down.
    load_format = "dummy" if "--load-format dummy" in report.get("command", "") else "auto"
    defaults = {"slo_attainment": 0.99, "slo_itl_ms": None, "fuse": None, "compressed": False, "rounds": 1}
    return {**defaults, "load_format": load_format, **report}


def go_on_with(report: Report, before: Report) -> Report:
    """``report``, which has no cells yet, with those of a run ``before`` it. Each cell's harvest is a share of what
    training reached alone in its own run; ``runs`` has them all. Raises InvalidInputError where the two could not be
    compared."""
    _check_same(report, before)
    traces = {**before.get("traces", {}), **report.get("traces", {})}
    runs = [*_runs(before), *_runs(report)]
    both = {"traces": traces, "runs": runs, "notes": _notes(before, report)}
    return {**before, **report, **both, "cells": list(before["cells"])}


def check_continues(settings: Report, before: Report) -> None:
    """That a run with these ``settings``, as far as they are known before the model is loaded, can go on with the run
    ``before`` it, or InvalidInputError."""
    _check_same(settings, before)
    known = before.get("traces", {})
    for name, digest in settings["traces"].items():
        if known.get(name, digest) != digest:
            raise InvalidInputError(
                f"--trace: the file of --json was measured with another trace that is named {name}; rename this one",
                param="trace",
            )


def joined(parts: Mapping[str, Report]) -> Report:
    """One report of all cells, of files by their names; of cells that are in several that of the most rounds, or else
    the last. What training reaches alone is the mean of theirs. Raises InvalidInputError where they could not be
    compared."""
    first = next(iter(parts.values()))
    for name, part in parts.items():
        check_alike(first, part, name)
    for (name, part), (other_name, other) in itertools.combinations(parts.items(), 2):
        _check_same_requests(part, other, name, other_name)
    traces = {name: digest for part in parts.values() for name, digest in part.get("traces", {}).items()}
    cells: dict[object, dict[str, Any]] = {}
    for cell in (cell for part in parts.values() for cell in part["cells"]):
        known = cells.get(key := cell_key(cell))
        if known is None or _num_rounds(cell) >= _num_rounds(known):
            cells[key] = cell
    alone = sum(part["train_alone_tokens_per_s"] for part in parts.values()) / len(parts)
    runs = [run for part in parts.values() for run in _runs(part)]
    return {
        **first,
        "train_alone_tokens_per_s": round(alone, 2),
        **({"traces": traces} if traces else {}),
        **({"runs": runs} if len(runs) > 1 else {}),
        "notes": _notes(*parts.values()),
        "cells": [cell for place in by_place(list(cells.values())) for cell in place],
    }


def check_alike(report: Report, other: Report, what: str) -> None:
    """That what both of them say of model, machine and job is the same, or InvalidInputError; ``what``: the other."""
    for name in _SAME:
        if name in report and report[name] != other.get(name):
            raise InvalidInputError(
                f"{what} has {name} {other.get(name)!r}, not {report[name]!r}: they cannot be compared", param=name
            )


def num_repeated(parts: Mapping[str, Report]) -> int:
    """Cells that are in more than one of several files."""
    counts = Counter(cell_key(cell) for part in parts.values() for cell in part["cells"])
    return sum(count > 1 for count in counts.values())


def _num_rounds(cell: Mapping[str, Any]) -> int:
    return len(cell.get("harvest_of_runs") or ()) or 1


def _notes(*reports: Report) -> list[str]:
    """Of all of them, each once."""
    return list(dict.fromkeys(note for report in reports for note in report.get("notes", ())))


def unlike_rounds(parts: Mapping[str, Report]) -> str:
    """Which of several files, by their names, measured each cell how many times; empty where it is the same in all.
    Whatever the number a cell is a mean, and says how far its runs were apart: they can be compared."""
    rounds = {name: part["rounds"] for name, part in parts.items() if "rounds" in part}
    return ", ".join(f"{name} has {count}" for name, count in rounds.items()) if len(set(rounds.values())) > 1 else ""


def _check_same_requests(part: Report, other: Report, name: str, other_name: str) -> None:
    """That what both of them say of their requests is the same, or InvalidInputError."""
    for key in _SAME_IF_KNOWN:
        if key in part and key in other and part[key] != other[key]:
            raise InvalidInputError(
                f"{other_name} has {key} {other[key]!r}, {name} {part[key]!r}: they cannot be compared", param=key
            )
    known = part.get("traces", {})
    for trace, digest in other.get("traces", {}).items():
        if known.get(trace, digest) != digest:
            raise InvalidInputError(
                f"{other_name} was measured with another trace that is named {trace} (digest {digest}) than {name} "
                f"({known[trace]}): they cannot be compared",
                param="traces",
            )


def _check_same(report: Report, before: Report) -> None:
    """The same for a run that goes on, by the flag that has to be given otherwise, where there is one."""
    ours, theirs = ({**(each.get("training") or {}), **each} for each in (report, before))
    for name, flag in _FLAGS.items():
        if name in ours and name in theirs and ours[name] != theirs[name]:
            raise InvalidInputError(
                f"{flag}: the file of --json has {_as_given(theirs[name])}, not {_as_given(ours[name])}; --resume goes "
                "on with the same",
                param=name,
            )
    check_alike(report, before, "--resume: the file of --json")


def _as_given(value: object) -> str:
    """A flag's value in a person's words."""
    if value is None:
        return "the default"
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _runs(report: Report) -> list[dict[str, Any]]:
    """Of a report: each with its command, and what training reached alone."""
    names = ("command", "train_alone_tokens_per_s")
    return list(report.get("runs") or [{name: report[name] for name in names}])
