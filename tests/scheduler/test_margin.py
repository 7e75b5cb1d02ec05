"""How closely the TPOT target is aimed at follows what came of requests."""

from __future__ import annotations

import random

import pytest

from cotenant.core.plan import RequestView, Slo
from cotenant.scheduler.margin import Margin

TARGET = Slo(ttft_ms=500.0, tpot_ms=10.0)


def note(margin: Margin, tpot_ms: float, num_tokens: int = 21, *, is_over: bool = True) -> None:
    """A request whose last token has just come, at this mean gap."""
    before = RequestView("r", 0.0, first_token_s=100.0, num_generated=num_tokens - 1)
    margin.note(before, 1, 100.0 + (num_tokens - 1) * tpot_ms / 1e3, TARGET, is_over)


@pytest.mark.parametrize("attainment", [0.9, 0.99])
def test_as_many_requests_meet_the_target_as_are_to(attainment: float) -> None:
    """What was aimed at comes out longer by a random disturbance, as of prompts that come in between."""
    margin, rng, num_met = Margin(attainment), random.Random(0), 0
    rounds = 40_000
    for _ in range(rounds):
        tpot_ms = margin.value * TARGET.tpot_ms + rng.expovariate(1.0)
        num_met += tpot_ms <= TARGET.tpot_ms
        note(margin, tpot_ms)
    assert num_met / rounds == pytest.approx(attainment, abs=0.01)


def test_undisturbed_requests_are_aimed_at_closely_and_hopeless_ones_leave_half() -> None:
    margin = Margin(0.99)
    for _ in range(1000):
        note(margin, margin.value * TARGET.tpot_ms)
    assert margin.value == 0.98
    for _ in range(1000):
        note(margin, 25.0)
    assert margin.value == 0.5


def test_a_long_answer_is_judged_on_its_way() -> None:
    margin = Margin(0.99)
    before = margin.value
    note(margin, 25.0, 63, is_over=False)
    assert margin.value == before
    note(margin, 25.0, 64, is_over=False)
    assert margin.value < before


def test_an_answer_of_one_token_has_no_gap() -> None:
    margin = Margin(0.99)
    before = margin.value
    margin.note(RequestView("r", 0.0), 1, 5.0, TARGET, is_over=True)
    assert margin.value == before
