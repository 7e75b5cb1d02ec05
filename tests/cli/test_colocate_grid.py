"""In which order the cells of a grid are measured."""

from __future__ import annotations

from typing import Any

import pytest

from cotenant.cli.colocate_grid import Grid
from cotenant.cli.colocate_loads import ColocateLoad
from cotenant.core.plan import Slo
from cotenant.runtime.colocate_cell import Cell

POLICIES = ("inference-only", "adaptive", "llmstation", "harli", "static")


@pytest.mark.parametrize("num_sms", [None, 132])
def test_whoever_explores_partitions_does_so_once_before_anything_is_measured(num_sms: int | None) -> None:
    """What is known of latencies is common to all: none is to pay for what the others then know."""
    runs: list[tuple[int, float, str]] = []

    def load(batch_size: int) -> ColocateLoad:
        def measure(policy: str, slo: Slo) -> Cell:
            runs.append((batch_size, slo.tpot_ms, policy))
            return Cell(policy, slo, 1.0, 1, 0, 1, [1.0], [1.0], [1.0], 1.0, train_tokens_per_s=float(len(runs)))

        parameters = {"load": "steady", "batch_size": batch_size, "context": 100, "num_tokens": 10}
        return ColocateLoad(parameters, measure)

    loads, slos = [load(8), load(32)], [Slo(500.0, 10.0), Slo(500.0, 40.0)]
    report: dict[str, Any] = {
        "num_sms": num_sms,
        "train_alone_tokens_per_s": 100.0,
        "slo_attainment": 0.99,
        "cells": [],
    }
    grid = Grid([each.parameters for each in loads], slos, POLICIES, skip_hopeless=False)
    grid.measure(report, loads, None)
    explored = 2 if num_sms else 0
    assert runs[:explored] == [(8, 10.0, "adaptive"), (8, 10.0, "harli")][:explored]
    measured = [(size, slo.tpot_ms, policy) for size in (8, 32) for slo in slos for policy in POLICIES]
    assert runs[explored:] == measured
    assert [cell["train_tokens_per_s"] for cell in report["cells"]] == list(range(explored + 1, len(runs) + 1))
    grid.measure(report, loads, None)
    assert len(runs) == explored + len(measured), "nothing is missing"
