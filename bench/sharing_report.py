"""The report of bench/compare_sharing.py, in the form of `cotenant bench colocate`'s, and how the two become one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from cotenant.bench.colocate_text import place_name
from cotenant.bench.comparison import by_place, cell_key, compare, place_key
from cotenant.bench.machine import command_line, machine
from cotenant.core.plan import Slo


def new_report(model: str, arguments: argparse.Namespace, peer: str, *, compressed: bool) -> dict[str, Any]:
    """Without figures as yet. ``sharing`` is what `bench colocate` has not. ``compressed``: servers read compressed
    copies of the weights."""
    command = command_line(["python", *sys.argv])
    job = {"seq_len": arguments.seq_len, "tokens_per_step": arguments.tokens_per_step, "tasklet_tokens": 0}
    return {
        "kind": "colocate",
        "label": peer,
        "model": model,
        "compressed": compressed,
        "training": {**job, "r": arguments.r, "gradient_checkpointing": False},
        "machine": machine(),
        "command": command,
        "slo_attainment": arguments.slo_attainment,
        "sharing": {"peer": peer, "command": command, "trials": [], "policies": {}},
        "cells": [],
    }


def places_missing(base: Mapping[str, Any], loads: Sequence[Mapping[str, Any]], slos: Sequence[Slo]) -> list[str]:
    """The names of the places of these loads and targets of which ``base`` has no cell."""
    known = {place_key(cell) for cell in base["cells"]}
    places = [{**load, "slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms}} for load in loads for slo in slos]
    return [place_name(place) for place in places if place_key(place) not in known]


def merged(base: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the cells of ``report``, which take the place of those of the same policy and place, compared
    anew."""
    replaced = {cell_key(cell) for cell in report["cells"]}
    cells = [cell for cell in base["cells"] if cell_key(cell) not in replaced]
    alone = {"train_alone_tokens_per_s": report["train_alone_tokens_per_s"]}
    whole = {
        **base,
        "sharing": {**report["sharing"], **alone, "versions": report["versions"], "training": report["training"]},
        "cells": [cell for place in by_place([*cells, *report["cells"]]) for cell in place],
    }
    return {**whole, "comparison": compare(whole, base.get("slo_attainment", report["slo_attainment"]))}
