"""Tests on machines that go unevenly: what a clock decides is tried again where something disturbed it."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def until_undisturbed(run: Callable[[int], str | None], num_runs: int = 5) -> None:
    """Call ``run`` with 0, 1 and so on until it has no complaint about what a clock decided. What holds however long
    things take, it asserts itself each time."""
    complaints: list[str] = []
    while len(complaints) < num_runs:
        complaint = run(len(complaints))
        if complaint is None:
            return
        complaints.append(complaint)
    pytest.fail(f"so in each of {num_runs} runs: {'; '.join(complaints)}")


def holds_once(measure: Callable[[], bool]) -> bool:
    """Whether something that is measured holds in one of five measurements."""
    return any(measure() for _ in range(5))
