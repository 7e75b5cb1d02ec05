"""How closely the TPOT target is aimed at follows what came of requests."""

from __future__ import annotations

import itertools
import random

import pytest

from cotenant.scheduler.margin import Margin

TARGET_MS = 10.0
_NAMES = itertools.count()


def serve(
    margin: Margin, tpot_ms: float, num_tokens: int = 21, *, trained_ms: float = 3.0, count: int = 1, ends: bool = True
) -> None:
    """So many requests side by side, at this mean gap, ``trained_ms`` of it because of training."""
    names = [f"r{next(_NAMES)}" for _ in range(count)]
    for name in names:
        margin.note(name, 1, 100.0, is_over=False)
    margin.trained(trained_ms * (num_tokens - 1))
    for name in names:
        margin.note(name, num_tokens - 1, 100.0 + (num_tokens - 1) * tpot_ms / 1e3, is_over=ends)
    margin.settle()


@pytest.mark.parametrize("attainment", [0.9, 0.99])
def test_as_many_requests_meet_the_target_as_are_to(attainment: float) -> None:
    """What was aimed at comes out longer by a random disturbance, as of prompts that come in between."""
    margin, rng, num_met = Margin(TARGET_MS, attainment), random.Random(0), 0
    rounds = 40_000
    for _ in range(rounds):
        tpot_ms = margin.value * TARGET_MS + rng.expovariate(1.0)
        num_met += tpot_ms <= TARGET_MS
        serve(margin, tpot_ms, trained_ms=tpot_ms)
    assert num_met / rounds == pytest.approx(attainment, abs=0.01)


def test_undisturbed_requests_are_aimed_at_closely_and_many_misses_leave_half() -> None:
    margin = Margin(TARGET_MS, 0.99)
    for _ in range(1000):
        serve(margin, margin.value * TARGET_MS)
    assert margin.value == 0.98
    for _ in range(1000):
        serve(margin, 12.0)
    assert margin.value == 0.5


def test_one_disturbance_of_many_requests_counts_once() -> None:
    one, many = Margin(TARGET_MS, 0.99), Margin(TARGET_MS, 0.99)
    serve(one, 12.0)
    serve(many, 12.0, count=32)
    assert many.value == pytest.approx(one.value)


def test_training_that_was_left_no_room_gets_some_again() -> None:
    """Where the least that is aimed at is less than a step takes, no request could ever show that there is room."""
    margin = Margin(TARGET_MS, 0.99)
    for _ in range(100):
        serve(margin, 12.0)
    assert margin.value == 0.5
    for _ in range(1000):
        serve(margin, 6.0, trained_ms=0.0)
    assert margin.value == pytest.approx(0.9, abs=0.01)


def test_a_miss_that_training_has_no_part_in_teaches_nothing() -> None:
    margin = Margin(TARGET_MS, 0.99)
    before = margin.value
    serve(margin, 25.0, trained_ms=3.0)
    serve(margin, 25.0, trained_ms=0.0)
    assert margin.value == before


def test_a_long_answer_is_judged_on_its_way_and_misses_once() -> None:
    margin = Margin(TARGET_MS, 0.99)
    before = margin.value
    serve(margin, 12.0, 63, ends=False)
    assert margin.value == before
    serve(margin, 12.0, 64, ends=False)
    after = margin.value
    assert after < before
    name = f"r{next(_NAMES) - 1}"
    for number in range(2, 20):
        margin.trained(64 * 3.0)
        margin.note(name, 64, 100.0 + 64 * number * 0.012, is_over=False)
        margin.settle()
    assert margin.value == after


def test_an_answer_of_one_token_has_no_gap() -> None:
    margin = Margin(TARGET_MS, 0.99)
    before = margin.value
    margin.note("r", 1, 5.0, is_over=True)
    margin.settle()
    assert margin.value == before
