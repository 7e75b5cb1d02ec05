"""When launched work began and ended, by a device's clock that is a list of numbers here."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from cotenant.device.readback import Interval


class Event:
    """One that was recorded at a time, or will be (None)."""

    times_ms: ClassVar[list[float | None]] = []

    def __init__(self, enable_timing: bool) -> None:
        self.at_ms: float | None = None

    def record(self) -> None:
        self.at_ms = self.times_ms.pop(0)

    def query(self) -> bool:
        return self.at_ms is not None

    def synchronize(self) -> None:
        assert self.at_ms is not None

    def elapsed_time(self, other: Event) -> float:
        assert self.at_ms is not None
        assert other.at_ms is not None
        return other.at_ms - self.at_ms


@pytest.mark.parametrize(
    ("behind_ms", "expected_ms", "overtook"),
    [
        (12.0, 8.0, False),
        (10.0, 10.0, False),
        (9.0, 10.0, False),
        (19.0, 1.0, False),
        (20.0, 10.0, True),
        (25.0, 10.0, True),
        (None, 10.0, True),
    ],
    ids=["it waited", "that came at once", "before", "shortly before its end", "at it", "after", "that has not come"],
)
def test_what_work_waited_for_is_no_part_of_its_time(
    monkeypatch: pytest.MonkeyPatch, behind_ms: float | None, expected_ms: float, overtook: bool
) -> None:
    """Unless it ended before."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    interval = Interval(torch.device("cuda"))
    Event.times_ms = [10.0, 20.0, behind_ms]
    interval.begin()
    interval.end()
    behind = Event(enable_timing=True)
    behind.record()
    assert interval.milliseconds() == 10.0
    assert interval.milliseconds(behind) == expected_ms  # type: ignore[arg-type]
    assert interval.overtook(behind) == overtook  # type: ignore[arg-type]
