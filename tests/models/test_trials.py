"""Finding the fastest way while it is used."""

from __future__ import annotations

import math
import random
import statistics

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
def test_settles_in_few_turns_however_late_times_come(times_ms: list[float], seed: int, lag: int) -> None:
    times = dict(enumerate(times_ms, -1))
    trials = Trials(times)
    asked = turns(trials, times, random.Random(seed), lag)
    assert trials.settled is not None
    assert trials.next() is None
    assert len(asked) <= 5 * len(times) + 6 * (lag + 1)


@pytest.mark.parametrize("spread", [0.1, 0.3, 1.0])
def test_what_is_found_is_hardly_slower_than_the_fastest(spread: float) -> None:
    found, counts = [], []
    for seed in range(200):
        noise = random.Random(seed)
        times = {way: 1 + spread * noise.random() for way in range(17)}
        trials = Trials(times)
        counts.append(len(turns(trials, times, noise, lag=3)))
        assert trials.settled is not None
        found.append(times[trials.settled] / min(times.values()))
    assert statistics.fmean(found) < 1.01
    assert sorted(found)[int(0.95 * len(found))] < 1.08
    assert statistics.median(counts) <= 75


def test_one_slow_turn_gives_nothing_up() -> None:
    times = {0: 1.0, 1: 0.9, 2: 0.95}
    trials = Trials(times)
    is_first = dict.fromkeys(times, True)
    while (way := trials.next()) is not None:
        trials.note(way, 20.0 if way == 1 and is_first[way] else times[way])
        is_first[way] = False
    assert trials.settled == 1


def test_what_is_never_timed_is_not_waited_for() -> None:
    trials = Trials((0, 1))
    for _ in range(MOST_TURNS):
        way = trials.next()
        if way is None:
            break
        if way == 1:
            trials.note(1, 0.5)
    assert trials.settled == 1
    nothing = Trials((3, 4))
    while nothing.next() is not None:
        pass
    assert nothing.settled == 3, "the first one, of which nothing more is known than of the other"


def test_what_is_tried_for_the_first_time_is_not_ordinary() -> None:
    trials = Trials((0, 1, 2))
    assert [trials.is_ordinary(way) for way in range(3)] == [True, False, False]
    for way, elapsed_ms in ((0, 1.2), (1, 1.0), (2, 1.05)):
        trials.note(way, elapsed_ms)
    assert [trials.is_ordinary(way) for way in range(3)] == [True, True, True]
    trials.note(2, 1.5)
    assert not trials.is_ordinary(2)


def test_each_is_timed_before_any_is_timed_again() -> None:
    trials = Trials(range(5))
    assert [trials.next() for _ in range(10)] == [*range(5), *range(5)]


def test_the_best_so_far_is_the_first_until_something_is_known() -> None:
    trials = Trials((3, 1, 2))
    assert trials.best == 3
    assert trials.median_ms(3) == math.inf
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
