"""How closely the TPOT target is aimed at follows what came of requests."""

from __future__ import annotations

import itertools
import random

import pytest

from cotenant.core.plan import RequestView, Slo
from cotenant.scheduler.margin import Margin

TARGET = Slo(ttft_ms=500.0, tpot_ms=10.0)
_NAMES = itertools.count()


def serve(margin: Margin, tpot_ms: float, num_tokens: int = 21, *, trained_ms: float = 3.0, ends: bool = True) -> None:
    """A request from its first token to its last, at this mean gap, ``trained_ms`` of it because of training."""
    name = f"r{next(_NAMES)}"
    margin.note(RequestView(name, 99.0), 1, 100.0, TARGET, is_over=False)
    margin.trained(trained_ms * (num_tokens - 1))
    before = RequestView(name, 99.0, first_token_s=100.0, num_generated=num_tokens - 1)
    margin.note(before, 1, 100.0 + (num_tokens - 1) * tpot_ms / 1e3, TARGET, ends)


@pytest.mark.parametrize("attainment", [0.9, 0.99])
def test_as_many_requests_meet_the_target_as_are_to(attainment: float) -> None:
    """What was aimed at comes out longer by a random disturbance, as of prompts that come in between."""
    margin, rng, num_met = Margin(attainment), random.Random(0), 0
    rounds = 40_000
    for _ in range(rounds):
        tpot_ms = margin.value * TARGET.tpot_ms + rng.expovariate(1.0)
        num_met += tpot_ms <= TARGET.tpot_ms
        serve(margin, tpot_ms, trained_ms=tpot_ms)
    assert num_met / rounds == pytest.approx(attainment, abs=0.01)


def test_undisturbed_requests_are_aimed_at_closely_and_many_misses_leave_half() -> None:
    margin = Margin(0.99)
    for _ in range(1000):
        serve(margin, margin.value * TARGET.tpot_ms)
    assert margin.value == 0.98
    for _ in range(1000):
        serve(margin, 12.0)
    assert margin.value == 0.5


@pytest.mark.parametrize(("tpot_ms", "trained_ms"), [(25.0, 3.0), (25.0, 0.0), (5.0, 0.0)])
def test_what_training_has_no_part_in_teaches_nothing(tpot_ms: float, trained_ms: float) -> None:
    """A miss that there would have been without it, and requests that it did not run beside."""
    margin = Margin(0.99)
    before = margin.value
    serve(margin, tpot_ms, trained_ms=trained_ms)
    assert margin.value == before


def test_a_long_answer_is_judged_on_its_way() -> None:
    margin = Margin(0.99)
    before = margin.value
    serve(margin, 12.0, 63, ends=False)
    assert margin.value == before
    serve(margin, 12.0, 64, ends=False)
    assert margin.value < before


def test_an_answer_of_one_token_has_no_gap() -> None:
    margin = Margin(0.99)
    before = margin.value
    margin.note(RequestView("r", 0.0), 1, 5.0, TARGET, is_over=True)
    assert margin.value == before
