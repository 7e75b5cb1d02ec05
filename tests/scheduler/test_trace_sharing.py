"""Requests that come by themselves: they are served as in time as without training, and training gets what is left."""

from __future__ import annotations

import random
import statistics
from functools import cache

import pytest

from cotenant.core.plan import Slo
from scheduler.trace_machine import PARTITIONS, Arrival, TraceMachine, arrivals

# (a second, prompt, answer, seconds): a chat, a busy one, short questions, many of them, a word or two about a text
CHAT, BUSY, FULL = (5.0, 1000, 200, 20.0), (12.0, 1000, 200, 20.0), (14.0, 1000, 200, 20.0)
SHORT, CROWD, WORDS = (100.0, 60, 20, 8.0), (300.0, 40, 8, 6.0), (15.0, 1000, 2, 40.0)
# Completions: long prompts, a line each.
LINES = (2.5, 2000, 14, 60.0)

Load = tuple[float, int, int, float]


@cache
def outcome(policy: str, load: Load, target_ms: float, seed: int = 1) -> tuple[float, float]:
    """Attainment and harvest."""
    slo, partitions = Slo(500.0, target_ms), PARTITIONS.get(policy, ())
    return TraceMachine(policy, slo, partitions, arrivals(*load, seed)).run_trace()


@pytest.mark.parametrize("target_ms", [10.0, 15.0, 40.0])
@pytest.mark.parametrize("load", [CHAT, SHORT])
def test_adaptive_serves_in_time_and_trains_more_than_multitask(load: Load, target_ms: float) -> None:
    attainment, harvest = outcome("adaptive", load, target_ms)
    assert outcome("inference-only", load, target_ms)[0] == 1.0
    assert attainment >= 0.99
    assert harvest > 1.05 * outcome("multitask", load, target_ms)[1]


@pytest.mark.parametrize(("load", "least"), [(BUSY, 0.53), (FULL, 0.48)])
def test_what_requests_have_saved_up_is_spent_before_others_join_them(load: Load, least: float) -> None:
    attainment, harvest = outcome("adaptive", load, 40.0)
    assert attainment >= 0.99
    assert harvest > least, "0.513 and 0.461 where prompts are never held"


def test_prompts_find_room_beside_steps_that_take_all_that_the_target_leaves() -> None:
    """Else they go by the smallest chunks, which nothing shares."""
    attainment, harvest = outcome("adaptive", CHAT, 10.0)
    assert attainment >= 0.99
    assert harvest > 0.45, "0.43 where training takes all"
    assert harvest > outcome("harli", CHAT, 10.0)[1]


@pytest.mark.parametrize(("load", "target_ms", "least"), [(CROWD, 15.0, 0.2), (CROWD, 40.0, 0.2), (SHORT, 40.0, 0.43)])
def test_training_goes_on_where_every_batch_has_prompts(load: Load, target_ms: float, least: float) -> None:
    """New requests come within nearly each: they wait for tasklets for a little of their target."""
    attainment, harvest = outcome("adaptive", load, target_ms)
    assert attainment >= 0.99
    assert harvest > max(least, outcome("harli", load, target_ms)[1])


def test_a_prompt_costs_training_its_own_batches_and_not_the_step_behind_them() -> None:
    """That one is planned while they are in flight."""
    for policy, load, least in (("harli", SHORT, 0.3), ("harli", CROWD, 0.08), ("multitask", SHORT, 0.18)):
        attainment, harvest = outcome(policy, load, 40.0)
        assert attainment == 1.0
        assert harvest > least


@pytest.mark.parametrize("target_ms", [15.0, 25.0])
def test_chunks_one_after_the_other_leave_short_answers_in_time(target_ms: float) -> None:
    """Each is as large as their slack when the one before has ended, not when it began."""
    attainment, harvest = outcome("adaptive", LINES, target_ms)
    assert attainment >= outcome("inference-only", LINES, target_ms)[0] - 0.005
    assert attainment >= 0.99
    assert harvest > 0.7


@cache
def bursts(size: int = 4) -> tuple[Arrival, ...]:
    """So many long prompts at once, a line each."""
    rng = random.Random(3)
    return tuple(
        Arrival(1.5 * burst + 0.001 * place, rng.randint(1000, 2500), rng.randint(5, 12))
        for burst in range(40)
        for place in range(size)
    )


@pytest.mark.parametrize("target_ms", [15.0, 25.0, 40.0])
@pytest.mark.parametrize("policy", ["inference-only", "adaptive"])
def test_who_is_first_of_a_burst_is_in_time_as_the_others_are(policy: str, target_ms: float) -> None:
    """Their prompts have time: in chunks as large as may be they would take all of its few tokens' time."""
    target = Slo(500.0, target_ms)
    attainment, _ = TraceMachine(policy, target, PARTITIONS.get(policy, ()), bursts()).run_trace()
    assert attainment >= 0.985, "0.76, 0.92 and 0.981 where a request counts from half of a short answer on"


@pytest.mark.parametrize(("size", "target_ms", "least"), [(6, 15.0, 0.99), (8, 15.0, 0.92), (8, 25.0, 0.99)])
@pytest.mark.parametrize("policy", ["inference-only", "adaptive"])
def test_where_a_burst_takes_all_the_time_there_is_its_first_are_not_given_up(
    policy: str, size: int, target_ms: float, least: float
) -> None:
    target = Slo(500.0, target_ms)
    attainment, _ = TraceMachine(policy, target, PARTITIONS.get(policy, ()), bursts(size)).run_trace()
    assert attainment >= least, "0.95, 0.83 and 0.984 where it has no say before its first token, nor in need"


def test_first_tokens_come_in_time_where_prompts_take_a_third_of_the_device() -> None:
    for target_ms in (10.0, 40.0):
        assert outcome("inference-only", BUSY, target_ms)[0] == 1.0
        assert outcome("adaptive", BUSY, target_ms)[0] >= 0.99


def test_answers_that_are_long_have_time_to_make_up_for_their_first_tokens() -> None:
    """Any may end while it is short, until it has been seen that hardly one does."""
    attainment, harvest = outcome("adaptive", BUSY, 25.0)
    assert attainment == 1.0
    assert harvest > 0.46, "0.4545 where that is not learned"


def test_training_goes_on_beside_requests_that_are_late_where_steps_leave_little_of_the_target() -> None:
    """Prompts take two thirds of the device. To serve alone until every request has caught up would be to lose what a
    step in a partition gets, at a rate that tasklets behind later steps do not make up for."""
    attainment, harvest = outcome("adaptive", FULL, 10.0)
    assert attainment == outcome("inference-only", FULL, 10.0)[0] == 1.0
    assert harvest > 0.985 * outcome("harli", FULL, 10.0)[1]


def test_where_prompts_crowd_and_steps_leave_little_of_the_target_training_keeps_most_of_it() -> None:
    """To aim at much less would get hardly a request further ahead."""

    def mean(policy: str) -> tuple[float, float]:
        found = [outcome(policy, FULL, 10.0, seed) for seed in (3, 4, 6)]
        return statistics.fmean(each[0] for each in found), statistics.fmean(each[1] for each in found)

    (attainment, harvest), alone = mean("adaptive"), mean("inference-only")[0]
    assert attainment > alone - 0.01
    assert harvest > 0.15, "0.143 by a share of what steps leave, not of its square"


@pytest.mark.parametrize(("rate", "target_ms"), [(22.0, 25.0), (24.0, 40.0)])
def test_where_prompts_fill_the_device_training_makes_no_more_late_than_others_and_gets_further(
    rate: float, target_ms: float
) -> None:
    """Serving alone is late for one to sixteen of a hundred, by how the requests fall: so on average of four draws."""

    def mean(policy: str) -> tuple[float, float]:
        found = [outcome(policy, (rate, 1200, 200, 30.0), target_ms, seed) for seed in (1, 2, 3, 4)]
        return statistics.fmean(each[0] for each in found), statistics.fmean(each[1] for each in found)

    alone, (attainment, harvest) = mean("inference-only")[0], mean("adaptive")
    assert alone < 0.99
    assert attainment > alone - 0.03
    for other in ("harli", "llmstation"):
        assert attainment > mean(other)[0]
        assert harvest > 1.05 * mean(other)[1]


@pytest.mark.parametrize("policy", ["inference-only", "adaptive"])
def test_one_long_prompt_does_not_make_all_late_that_came_behind_it(policy: str) -> None:
    """The long ones alone are, whose turn comes all the same."""
    crowds = [
        Arrival(4.0 * crowd + 0.001 * place, 8000 if place < 2 else 1000, 60)
        for crowd in range(6)
        for place in range(9)
    ]
    machine = TraceMachine(policy, Slo(500.0, 40.0), PARTITIONS.get(policy, ()), crowds)
    attainment, _ = machine.run_trace()
    late = [request for request in machine.done if not request.meets(Slo(500.0, 40.0))]
    assert attainment >= 8 / 9, "3 of 9 are late in the order in which they came"
    assert all(request.arrival.num_prompt == 8000 for request in late)
    assert max(request.token_s[0] - request.arrival_s for request in machine.done) < 1.0


def test_answers_of_a_word_or_two_teach_how_closely_they_may_be_aimed_at() -> None:
    """A prompt that comes in between makes them late, and they have no tokens to make up for it."""
    slo, later = Slo(500.0, 40.0), []
    for seed in (1, 2, 3):
        machine = TraceMachine("adaptive", slo, PARTITIONS["adaptive"], arrivals(*WORDS, seed))
        attainment, harvest = machine.run_trace()
        assert attainment > 0.98, "while it is being learned"
        assert machine.margin < 0.85
        assert harvest > 0.5
        later += machine.done[len(machine.done) // 2 :]
    assert sum(request.meets(slo) for request in later) >= 0.99 * len(later)
