"""Less of the target is aimed at where prompts take most of the device and first tokens come late in theirs."""

from __future__ import annotations

import math

import pytest

from cotenant.core.plan import Slo
from cotenant.scheduler.crowding import Crowding
from cotenant.scheduler.margin import Margin

SLO = Slo(500.0, 40.0)


def crowding(ttft_ms: float, prompt_share: float) -> tuple[Crowding, float]:
    """After half a minute like that, and when that is."""
    found, now_s = Crowding(SLO), 100.0
    for _ in range(300):
        now_s += 0.1
        found.prompts_took(100.0 * prompt_share, now_s)
        found.first_token(ttft_ms, now_s)
    return found, now_s


@pytest.mark.parametrize(
    ("ttft_ms", "prompt_share", "most"),
    [(490.0, 0.2, 1.0), (100.0, 0.95, 1.0), (300.0, 0.5, 0.92), (400.0, 0.9, 0.6), (5000.0, 0.99, 0.6)],
)
def test_both_have_to_be_high(ttft_ms: float, prompt_share: float, most: float) -> None:
    """A long prompt that comes alone is late without any crowd; a full device whose first tokens are early has room."""
    found, now_s = crowding(ttft_ms, prompt_share)
    assert found.most(now_s) == pytest.approx(most, abs=0.01)


def test_it_is_over_soon() -> None:
    found, now_s = crowding(450.0, 0.9)
    values = [found.most(now_s + after_s) for after_s in (0.0, 2.0, 4.0, 10.0)]
    assert values == sorted(values)
    assert (values[0], values[-1]) == (0.6, 1.0)


def test_the_latest_of_the_late_first_tokens_counts_and_not_the_one_in_time_after_it() -> None:
    found, now_s = crowding(450.0, 0.9)
    found.first_token(10.0, now_s)
    assert found.most(now_s) == 0.6


def test_nothing_is_taken_off_where_nothing_has_come() -> None:
    assert Crowding(SLO).most(0.0) == 1.0


def test_the_margin_goes_by_it_and_learns_nothing_of_more_meanwhile() -> None:
    margin, now_s = Margin(SLO), 100.0
    margin.begin_at(0.9)

    def answer(name: str, arrival_s: float, first_s: float) -> None:
        margin.arrived(name, arrival_s)
        margin.note(name, 1, first_s, is_over=False)
        margin.note(name, 100, first_s + 0.5, is_over=True)
        margin.settle(first_s + 0.5)

    for index in range(50):
        margin.prompts_took(950.0, now_s + index + 1.0)
    now_s += 50.0
    answer("late", now_s - 0.45, now_s)
    assert margin.aim(now_s) == pytest.approx(0.6)
    before = margin.value
    answer("fast", now_s, now_s + 0.1)
    assert margin.value == before
    answer("unknown", math.nan, now_s + 0.2)
    now_s += 30.0
    assert margin.aim(now_s) == margin.value
    answer("fast again", now_s, now_s + 0.1)
    assert margin.value > before
