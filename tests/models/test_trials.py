"""Finding the fastest way while it is used."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.models.trials import Trials

MOST_TURNS = 400


def turns(trials: Trials, times_ms: dict[int, float], noise: random.Random, lag: int = 0) -> list[int]:
    """Time what is asked for, with up to half as much again of noise in a third of the turns, and known ``lag`` turns
    later, until it is settled."""
    asked: list[int] = []
    waiting: list[tuple[int, float]] = []
    for _ in range(MOST_TURNS):
        way = trials.next()
        if way is None:
            return asked
        asked.append(way)
        slower = 1 + noise.random() / 2 if noise.random() < 1 / 3 else 1 + noise.random() / 100
        waiting.append((way, times_ms[way] * slower))
        while len(waiting) > lag:
            trials.note(*waiting.pop(0))
    raise AssertionError(f"not settled in {MOST_TURNS} turns")


@given(
    times_ms=st.lists(st.floats(0.1, 2.0), min_size=1, max_size=17),
    seed=st.integers(0, 1000),
    lag=st.integers(0, 5),
)
def test_settles_on_one_of_the_fastest_though_some_turns_are_slow(times_ms: list[float], seed: int, lag: int) -> None:
    times = dict(enumerate(times_ms, -1))
    trials = Trials(times)
    asked = turns(trials, times, random.Random(seed), lag)
    assert trials.settled is not None
    assert trials.next() is None
    assert times[trials.settled] <= 1.5 * min(times_ms)
    assert len(asked) <= 7 * len(times) + 6 * (lag + 1)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_clearly_fastest_is_found_in_few_turns(seed: int) -> None:
    times = dict.fromkeys(range(16), 1.3) | {9: 0.8}
    trials = Trials(times)
    asked = turns(trials, times, random.Random(seed))
    assert trials.settled == 9
    assert len(asked) <= 50


def test_each_is_timed_before_any_is_timed_again() -> None:
    trials = Trials(range(5))
    assert [trials.next() for _ in range(10)] == [*range(5), *range(5)]


def test_the_best_so_far_is_the_first_until_something_is_known() -> None:
    trials = Trials((3, 1, 2))
    assert trials.best == 3
    assert trials.median_ms(3) is None
    trials.note(1, 2.0)
    assert (trials.best, trials.median_ms(1)) == (1, 2.0)


def test_one_that_cannot_be_done_is_not_asked_for_again_but_the_first_one_can() -> None:
    trials = Trials((0, 1, 2))
    for way in (0, 1):
        trials.drop(way)
    assert {trials.next() for _ in range(10)} == {0, 2}
    trials.note(1, 0.001)  # it had been launched before
    assert trials.best == 0
    while (way := trials.next()) is not None:
        trials.note(way, 1.0 + way)
    assert trials.settled == 0
