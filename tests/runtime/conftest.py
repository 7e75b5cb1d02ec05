"""What tests of the executor and of the loop share. ``test_training.py`` has another ``bench``, which hides this."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from clocks import SteppedTime
from cotenant.device import readback
from cotenant.device.cpu import device as cpu_device
from cotenant.engine.engine import OnlineEngine
from cotenant.runtime import executor as executor_module
from cotenant.runtime import loop as loop_module
from cotenant.runtime import tasklet_lanes
from runtime import cotenancy
from runtime.executor_bench import Bench
from runtime.side_by_side import SideBySide


@pytest.fixture
def loop_clock(monkeypatch: pytest.MonkeyPatch) -> SteppedTime:
    """The loop's and the requests': what a batch, a message or a pause of the machine takes is nothing."""
    return SteppedTime(monkeypatch, loop_module, cotenancy)


@pytest.fixture
def executor_clock(monkeypatch: pytest.MonkeyPatch) -> SteppedTime:
    """Of all that times batches and tasklets, from here on: ask for it before ``side_by_side``."""
    return SteppedTime(monkeypatch, executor_module, tasklet_lanes, readback, cpu_device)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.pause()


@pytest.fixture
def side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SideBySide]:
    looks = iter([])
    monkeypatch.setattr(OnlineEngine, "has_landed", property(lambda _: next(looks, True)))
    monkeypatch.setattr(tasklet_lanes, "_FILLING_S", 60.0)  # a CPU's tasklets are done when they are launched
    bench = SideBySide(tmp_path)

    def land_after(count: int) -> None:
        nonlocal looks
        looks = iter([False] * count)

    bench.land_after = land_after  # type: ignore[attr-defined]
    yield bench
    bench.pause()
