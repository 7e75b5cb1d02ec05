"""Margins that keep what the loop tells them."""

from __future__ import annotations

import pytest

from cotenant.core.plan import Slo
from cotenant.runtime import loop as loop_module
from cotenant.scheduler.margin import Margin


class Noted(Margin):
    """A margin that keeps what it is told."""

    def __init__(self, slo: Slo) -> None:
        super().__init__(slo)
        self.begins: list[float] = []
        self.arrivals: dict[str, float] = {}
        self.tokens: dict[str, list[float]] = {}
        self.prompts_ms: list[float] = []
        self.steps_ms: list[float] = []

    def expect_prompts(self, most: float, now_s: float, step_ms: float) -> None:
        self.steps_ms.append(step_ms)
        super().expect_prompts(most, now_s, step_ms)

    def begin_at(self, value: float) -> None:
        self.begins.append(value)
        super().begin_at(value)

    def arrived(self, request_id: str, at_s: float) -> None:
        self.arrivals[request_id] = at_s
        super().arrived(request_id, at_s)

    def prompts_took(self, time_ms: float, now_s: float) -> None:
        self.prompts_ms.append(time_ms)
        super().prompts_took(time_ms, now_s)

    def note(self, request_id: str, num_new: int, now_s: float, is_over: bool) -> int:
        self.tokens.setdefault(request_id, []).extend([now_s] * num_new)
        return super().note(request_id, num_new, now_s, is_over)


def noted_margins(monkeypatch: pytest.MonkeyPatch) -> list[Noted]:
    """Of the loops that are made from now on."""
    margins: list[Noted] = []

    def create(slo: Slo) -> Noted:
        margins.append(Noted(slo))
        return margins[-1]

    monkeypatch.setattr(loop_module, "Margin", create)
    return margins
