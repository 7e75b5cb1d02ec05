"""How closely the TPOT target is aimed at follows what came of requests."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

import pytest

from cotenant.core.plan import FIRST_MARGIN, Slo
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.scheduler import create_policy
from cotenant.scheduler.margin import Margin

SLO = Slo(500.0, 10.0)


@dataclass
class Server:
    """Requests one batch after the other, on a clock of its own."""

    margin: Margin = field(default_factory=lambda: Margin(SLO))
    now_s: float = 100.0
    names: itertools.count = field(default_factory=itertools.count)  # type: ignore[type-arg]

    @property
    def value(self) -> float:
        return self.margin.value

    def serve(self, tpot_ms: float, num_tokens: int = 21, *, trained_ms: float = 3.0, count: int = 1) -> None:
        """So many requests side by side, at this mean gap, ``trained_ms`` of it because of training."""
        names = [f"r{next(self.names)}" for _ in range(count)]
        self._note(names, 1, is_over=False)
        self.now_s += (num_tokens - 1) * tpot_ms / 1e3
        if trained_ms:
            self.margin.trained(trained_ms * (num_tokens - 1), self.now_s)
        self._note(names, num_tokens - 1, is_over=True)

    def wait(self, ttft_ms: float) -> None:
        """A request whose first and last token comes so late."""
        name = f"r{next(self.names)}"
        self.margin.arrived(name, self.now_s)
        self.now_s += ttft_ms / 1e3
        self._note([name], 1, is_over=True)

    def _note(self, names: list[str], num_new: int, *, is_over: bool) -> None:
        for name in names:
            self.margin.note(name, num_new, self.now_s, is_over)
        self.margin.settle(self.now_s)


@pytest.mark.parametrize("attainment", [0.9, 0.99])
def test_half_as_many_requests_miss_the_target_as_may(attainment: float) -> None:
    """What was aimed at comes out longer by a random disturbance, as of prompts that come in between."""
    server, rng, num_met = Server(Margin(replace(SLO, attainment=attainment))), random.Random(0), 0
    rounds = 40_000
    for _ in range(rounds):
        tpot_ms = server.value * SLO.tpot_ms + rng.expovariate(1.0)
        num_met += tpot_ms <= SLO.tpot_ms
        server.serve(tpot_ms, trained_ms=tpot_ms)
    assert 1 - num_met / rounds == pytest.approx((1 - attainment) / 2, rel=0.1)


def test_undisturbed_requests_are_aimed_at_closely_and_many_misses_leave_no_room() -> None:
    server = Server()
    for _ in range(1000):
        server.serve(server.value * SLO.tpot_ms)
    assert server.value == 0.98
    for _ in range(1000):
        server.serve(12.0)
    assert server.value == 0.2


def test_one_disturbance_of_many_requests_counts_once() -> None:
    one, many = Server(), Server()
    one.serve(12.0)
    many.serve(12.0, count=32)
    assert many.value == pytest.approx(one.value)


def test_training_that_has_no_room_from_the_start_gets_some() -> None:
    """Where a step takes more than is aimed at, nobody could ever show that there is room. Without a job it tells
    nothing that there was no training."""
    server = Server()
    server.margin.begin_at(0.8)
    server.serve(9.0)
    server.serve(12.0)  # the first miss: from here on the margin rises slowly
    low = server.value
    server.margin.has_job = False
    for _ in range(100):
        server.serve(9.0, trained_ms=0.0)
    assert server.value < low + 0.02
    server.margin.has_job = True
    for _ in range(100):
        server.serve(9.0, trained_ms=0.0)
    assert server.value == pytest.approx(FIRST_MARGIN, abs=0.01)


def test_training_that_was_left_no_room_gets_some_again() -> None:
    """Where the least that is aimed at is less than a step takes, no request could ever show that there is room."""
    server = Server()
    for _ in range(100):
        server.serve(12.0)
    assert server.value == 0.2
    for _ in range(1000):
        server.serve(6.0, trained_ms=0.0)
    assert server.value == pytest.approx(FIRST_MARGIN, abs=0.01)


def test_requests_that_training_happened_to_miss_do_not_count_for_more() -> None:
    """Of short answers most have no training in their gaps; what the others say would be drowned."""
    server = Server()
    for _ in range(50):
        server.serve(12.0)
    low = server.value
    for _ in range(50):
        server.serve(6.0, 3, trained_ms=0.0)
        server.serve(6.0, 3)
    assert server.value < low + 0.05


def test_a_miss_that_training_has_no_part_in_teaches_nothing() -> None:
    server = Server()
    before = server.value
    server.serve(25.0, trained_ms=3.0)
    server.serve(25.0, trained_ms=0.0)
    assert server.value == before


def test_a_miss_that_began_with_training_counts() -> None:
    """Of 5 ms too many 2 are training's own; the others are of prompts that came while it ran, and waited."""
    server = Server()
    before = server.value
    server.serve(15.0, trained_ms=2.0)
    assert server.value < before


def test_late_first_tokens_leave_prompts_more_room_up_to_a_point() -> None:
    """Prompts that are late by themselves would else end training for good."""
    server = Server()
    before = server.value
    for ttft_ms, trained_before_s, expected in ((400.0, 1.0, 0), (600.0, 1.0, 1), (600.0, 6.0, 0)):
        server.now_s += 20.0
        server.margin.trained(10.0, server.now_s)
        server.now_s += trained_before_s
        server.wait(ttft_ms)
        assert server.value == pytest.approx(before - 0.03 * expected)
        before = server.value
    for _ in range(50):
        server.margin.trained(10.0, server.now_s)
        server.wait(600.0)
    assert 0.45 < server.value <= 0.5


def test_first_tokens_that_are_late_without_training_teach_nothing_and_nothing_recovers_meanwhile() -> None:
    server = Server()
    for _ in range(10):
        server.serve(12.0)
    server.now_s += 10.0
    low = server.value
    assert 0.5 < low < 0.7
    for _ in range(50):
        server.wait(2000.0)
        server.serve(6.0, trained_ms=0.0)
    assert server.value == pytest.approx(low, abs=0.02), "prompts wait in line: no time to try training again"


def test_a_long_answer_is_judged_on_its_way_and_misses_once() -> None:
    margin = Margin(SLO)
    values, now_s = [margin.value], 100.0
    margin.note("r", 1, now_s, is_over=False)
    for num_new in (62, *[64] * 20):
        now_s += num_new * 0.012
        margin.trained(num_new * 3.0, now_s)
        margin.note("r", num_new, now_s, is_over=False)
        margin.settle(0.0)
        values.append(margin.value)
    assert values[1] == values[0], "not yet 64 tokens"
    assert values[2] < values[1]
    assert values[-1] == values[2]


def test_a_long_answer_that_meets_its_targets_counts_once() -> None:
    """Judged on its way, it would else outweigh the misses of many."""
    server = Server()
    server.serve(12.0)
    rises = []
    for num_parts in (1, 10):
        before, name = server.value, f"long {num_parts}"
        server.margin.arrived(name, server.now_s)
        server.margin.note(name, 1, server.now_s, False)
        for part in range(num_parts):
            server.now_s += 64 * 9e-3
            server.margin.trained(64 * 3.0, server.now_s)
            server.margin.note(name, 64, server.now_s, part == num_parts - 1)
            server.margin.settle(server.now_s)
        rises.append(server.value - before)
    assert rises[0] > 0
    assert rises[1] == pytest.approx(rises[0])


def test_who_has_missed_its_first_token_meets_no_target_any_more() -> None:
    server = Server()
    server.margin.trained(100.0, server.now_s)
    server.margin.arrived("late", server.now_s)
    server.now_s += 1.0
    server.margin.trained(100.0, server.now_s)
    server.margin.note("late", 1, server.now_s, False)
    server.margin.settle(server.now_s)
    before = server.value
    server.now_s += 20 * 9e-3
    server.margin.trained(20 * 3.0, server.now_s)
    server.margin.note("late", 20, server.now_s, True)
    server.margin.settle(server.now_s)
    assert before < FIRST_MARGIN
    assert server.value == before


def test_an_answer_of_one_token_has_no_gap() -> None:
    margin = Margin(SLO)
    before = margin.value
    margin.note("r", 1, 5.0, is_over=True)
    margin.settle(0.0)
    assert margin.value == before


def test_requests_that_another_loop_began_are_judged_from_their_first_tokens_on() -> None:
    """A burst now is no miss of who was far ahead."""
    margin = Margin(Slo(500.0, 10.0))
    margin.resume("r", first_s=100.0, num_tokens=300)
    for index in range(300, 400):
        now_s = 101.5 + (index - 299) * 0.020
        margin.trained(14.0, now_s)
        margin.note("r", 1, now_s, is_over=False)
        margin.settle(0.0)
    assert margin.value > FIRST_MARGIN


def test_until_the_first_miss_the_margin_rises_fast_and_by_long_answers_most() -> None:
    def value_after(first_tpot_s: float, num_tokens: int = 65) -> float:
        margin = Margin(Slo(500.0, 10.0))
        margin.begin_at(0.8)
        for number, tpot_s in enumerate((first_tpot_s, *[0.005] * 8)):
            margin.trained(100.0, number)
            margin.note(str(number), 1, number, is_over=False)
            margin.trained(200.0, number)
            margin.note(str(number), num_tokens - 1, number + (num_tokens - 1) * tpot_s, is_over=True)
            margin.settle(0.0)
        return margin.value

    assert value_after(0.005) > 0.8 + 0.015
    assert 0.8 < value_after(0.005, num_tokens=11) < 0.8 + 0.004
    assert value_after(0.012) < 0.8 - 0.02


def test_adaptive_begins_below_the_target_by_a_part_of_what_a_step_leaves_of_it() -> None:
    """It is training that makes requests late: where a step takes most of the target there is little to be careful
    with, and a fixed share would leave training nothing at all."""
    policy, slo = create_policy("adaptive", LatencyPredictor("device", "model")), Slo(500.0, 10.0)
    aims_ms = [10.0 * policy.first_margin(slo, step_ms) for step_ms in (0.0, 5.0, 7.0, 9.0, 12.0)]
    assert aims_ms == pytest.approx([8.0, 9.0, 9.4, 9.5, 9.5])
    assert create_policy("harli", LatencyPredictor("device", "model")).first_margin(slo, 5.0) == FIRST_MARGIN


def test_where_prompts_come_less_is_aimed_at_and_nothing_is_learned_of_more() -> None:
    server = Server()
    margin = server.margin
    margin.begin_at(0.95)
    margin.expect_prompts(0.9, server.now_s, 0.0)
    end_s = server.now_s + 5.0
    server.serve(5.0, count=20)
    assert (server.value, margin.aim(server.now_s)) == (0.95, 0.9)
    server.serve(12.0)
    missed = server.value
    assert missed < 0.9, "more would have been missed as well"
    margin.expect_prompts(0.8, server.now_s, 0.0)
    assert (margin.aim(server.now_s), margin.aim(end_s + 1.0)) == (0.8, missed), "for as long as some may come"
    server.now_s = end_s + 1.0
    for _ in range(100):
        server.serve(5.0)
    assert server.value > missed


def test_those_that_run_are_known_however_many_wait() -> None:
    server = Server()
    margin, num_waiting = server.margin, 5000
    margin.arrived("running", server.now_s)
    margin.note("running", 20, server.now_s, False)
    for index in range(num_waiting):
        margin.arrived(f"waiting-{index}", server.now_s)
    margin.trained(1000.0, server.now_s)
    server.now_s += 1.0
    assert margin.note("running", 30, server.now_s, True) == 50
    before = server.value
    margin.settle(server.now_s)
    assert server.value < before, "it took 20 ms for each of its tokens"
    assert margin.note(f"waiting-{num_waiting - 1}", 3, server.now_s, False) == 3
    assert margin.forget(f"waiting-{num_waiting - 1}") == 3
    assert margin.forget(f"waiting-{num_waiting - 2}") == 0


def test_a_margin_that_may_not_rise_only_falls() -> None:
    server = Server()
    server.margin.begin_at(0.9)
    server.margin.may_rise = False
    server.serve(8.0, 641)
    assert server.value == 0.9
    server.serve(12.0)
    fallen = server.value
    assert fallen < 0.9
    server.serve(8.0, count=50)
    assert server.value == fallen
    server.margin.may_rise = True
    server.serve(8.0)
    assert server.value > fallen
