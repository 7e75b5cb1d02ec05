"""Runs of `cotenant bench colocate` that become one: what was cut off and goes on, and parts of one grid."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cotenant.bench.comparison import by_place, cell_key
from cotenant.core.errors import InvalidInputError

KIND = "colocate"
_SAME = ("model", "dtype", "device", "num_sms", "training", "slo_attainment", "versions")

Report = dict[str, Any]


def read_report(path: Path) -> Report:
    """What `cotenant bench colocate --json` has written. Raises InvalidInputError."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}", param="file") from error
    if not isinstance(report, dict) or report.get("kind") != KIND:
        raise InvalidInputError(f"{path} is not what `cotenant bench colocate --json` writes", param="file")
    return {"slo_attainment": 0.99, **report}


def go_on_with(report: Report, before: Mapping[str, Any]) -> None:
    """Let ``report``, which has no cells yet, begin with those of a run ``before`` it. Each cell's harvest is a share
    of what training reached alone in its own run; ``runs`` has them all. Raises InvalidInputError where the two could
    not be compared."""
    _check_alike(report, before, "--resume: the file of --json")
    report["runs"] = [*_runs(before), *_runs(report)]
    report["cells"] = list(before["cells"])


def joined(parts: Sequence[Report]) -> Report:
    """One report of all cells; of those that are in several parts the last. What training reaches alone is the mean of
    the parts'. Raises InvalidInputError where parts could not be compared."""
    first = parts[0]
    for part in parts[1:]:
        _check_alike(first, part, "the second and each further file")
    cells = {cell_key(cell): cell for part in parts for cell in part["cells"]}
    alone = sum(part["train_alone_tokens_per_s"] for part in parts) / len(parts)
    return {
        **first,
        "train_alone_tokens_per_s": round(alone, 2),
        "runs": [run for part in parts for run in _runs(part)],
        "cells": [cell for place in by_place(list(cells.values())) for cell in place],
    }


def _runs(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of a report: each with its command, and what training reached alone."""
    names = ("command", "train_alone_tokens_per_s")
    return list(report.get("runs") or [{name: report[name] for name in names}])


def _check_alike(report: Mapping[str, Any], other: Mapping[str, Any], what: str) -> None:
    for name in _SAME:
        if report.get(name) != other.get(name):
            raise InvalidInputError(
                f"{what} has {name} {other.get(name)!r}, not {report.get(name)!r}: they cannot be compared", param=name
            )
