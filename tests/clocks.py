"""Time that a test tells."""

from __future__ import annotations

from types import ModuleType

import pytest

_LOOK_S = 1e-6


class SteppedTime:
    """Stands in for the module ``time`` in modules that read it: a busy machine's pauses change nothing. A microsecond
    passes with each look, and what is slept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        self.now_s = 1000.0
        for module in modules:
            monkeypatch.setattr(module, "time", self)

    def perf_counter(self) -> float:
        self.now_s += _LOOK_S
        return self.now_s

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
