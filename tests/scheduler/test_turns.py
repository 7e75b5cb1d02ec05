"""Whose prompts wait where not all first tokens can be in time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.plan import BatchShape, IterationRecord, Mode, RequestView, Slo, causal_pairs
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.scheduler.base import prompts_of
from cotenant.scheduler.turns import Turns, take_turns

NOW_S, SLO, TOKEN_MS = 100.0, Slo(500.0, 40.0), 0.1
IN_TIME_S = 0.95 * SLO.ttft_ms / 1e3
BUDGET = 4096


def taught() -> LatencyPredictor:
    """Prompts take 0.1 ms a token."""
    predictor = LatencyPredictor("simulated", "model")
    for tokens in range(128, BUDGET + 1, 128):
        batch = BatchShape(0, 0, tokens, tokens, 0, causal_pairs(tokens))
        for _ in range(3):
            predictor.observe(IterationRecord(batch, Mode.NONE, TOKEN_MS * tokens, TOKEN_MS * tokens))
    return predictor


PREDICTOR = taught()


@dataclass(frozen=True)
class Prompt:
    waited_ms: float
    tokens: int
    priority: int = 0


def views(prompts: list[Prompt]) -> tuple[RequestView, ...]:
    found = [
        RequestView(
            str(number), NOW_S - each.waited_ms / 1e3, num_prompt_tokens_left=each.tokens, priority=each.priority
        )
        for number, each in enumerate(prompts)
    ]
    return tuple(sorted(found, key=lambda view: (view.priority, view.arrival_s)))


def turns(requests: tuple[RequestView, ...], begins_ms: float = 0.0, num_seats: int | None = None) -> Turns:
    return take_turns(PREDICTOR, BatchShape(), prompts_of(requests), SLO, NOW_S, BUDGET, begins_ms, num_seats)


def last(requests: tuple[RequestView, ...], begins_ms: float = 0.0) -> frozenset[str]:
    return turns(requests, begins_ms).put_off


def batch_ms(num_tokens: int) -> float:
    shape = BatchShape(0, 0, num_tokens, num_tokens, 0, causal_pairs(num_tokens))
    predicted_ms = PREDICTOR.batch_ms(shape, cautious=False)
    assert predicted_ms is not None
    return predicted_ms


def num_late(requests: tuple[RequestView, ...]) -> int:
    """Served in this order, at what the predictor makes of a token."""
    total = min(BUDGET, sum(request.num_prompt_tokens_left for request in requests))
    token_s = batch_ms(total) / total / 1e3
    ends_s = itertools.accumulate((request.num_prompt_tokens_left * token_s for request in requests), initial=NOW_S)
    next(ends_s)
    return sum(end_s > request.arrival_s + IN_TIME_S for end_s, request in zip(ends_s, requests, strict=True))


prompts = st.builds(Prompt, waited_ms=st.floats(0, 900), tokens=st.integers(1, 4000))


@given(st.lists(prompts, min_size=2, max_size=6))
@settings(deadline=None)
def test_as_few_are_late_as_in_any_order(found: list[Prompt]) -> None:
    requests = views(found)
    late = last(requests)
    behind = sorted(requests, key=lambda request: request.request_id in late)
    assert num_late(tuple(behind)) == min(map(num_late, itertools.permutations(requests)))
    assert len(late) == num_late(tuple(behind)), "nobody is put off who would be in time at the end"


def served(requests: tuple[RequestView, ...]) -> Iterator[tuple[float, str]]:
    """When the first token of each comes, by batches that take turns, as (seconds, its id)."""
    now_s = NOW_S
    while requests:
        late, room = take_turns(PREDICTOR, BatchShape(), prompts_of(requests), SLO, now_s, BUDGET)
        assert 0 < room <= BUDGET
        left: dict[str, int] = {}
        for request in sorted(requests, key=lambda each: (each.priority, each.request_id in late)):
            left[request.request_id] = max(0, request.num_prompt_tokens_left - room)
            room -= request.num_prompt_tokens_left - left[request.request_id]
        now_s += batch_ms(sum(each.num_prompt_tokens_left - left[each.request_id] for each in requests)) / 1e3
        yield from ((now_s, request_id) for request_id, num_left in left.items() if num_left == 0)
        requests = tuple(
            msgspec.structs.replace(each, num_prompt_tokens_left=left[each.request_id])
            for each in requests
            if left[each.request_id]
        )


whole_tiles = st.builds(
    Prompt, waited_ms=st.floats(0, 900), tokens=st.integers(1, 31).map(lambda tiles: 128 * tiles)
)  # of which the predictor knows what they take


@given(st.lists(whole_tiles, min_size=2, max_size=8))
@settings(deadline=None)
def test_who_is_not_put_off_is_in_time_though_first_tokens_come_at_the_ends_of_batches(found: list[Prompt]) -> None:
    requests = views(found)
    late = last(requests)
    arrivals_s = {request.request_id: request.arrival_s for request in requests}
    for at_s, request_id in served(requests):
        assert request_id in late or at_s <= arrivals_s[request_id] + SLO.ttft_ms / 1e3


def test_a_batch_ends_where_those_in_time_have_no_more_time() -> None:
    """Late ones, those of a lower class and those in time themselves fill it as far as that."""
    soon = Prompt(300.0, 1000)  # 175 ms are left: 13 tiles of 12.8 ms
    for other in (Prompt(290.0, 3000), Prompt(0.0, 3000), Prompt(0.0, 3000, 1)):
        assert turns(views([soon, other])).budget == 13 * 128
    assert turns(views([Prompt(300.0, 1400), Prompt(295.0, 120)])).budget == 13 * 128
    assert turns(views([Prompt(0.0, 500), Prompt(300.0, 500, 1)])).budget == 13 * 128, "a lower class may have less"
    assert turns(views([Prompt(0.0, 1000), Prompt(0.0, 2000)])).budget == BUDGET
    assert turns(views([Prompt(300.0, 1700), Prompt(0.0, 3000)])).budget == 1700, "no fewer than its own"


def test_a_batch_has_less_time_where_it_begins_later() -> None:
    assert turns(views([Prompt(300.0, 1000), Prompt(0.0, 3000)]), begins_ms=50.0).budget == 9 * 128


@pytest.mark.parametrize("ttft_ms", [1e9, 1e308])
def test_a_target_that_is_never_reached_bounds_no_batch(ttft_ms: float) -> None:
    for budget in (BUDGET, 1000):  # the latter is no whole number of tiles
        found = take_turns(
            PREDICTOR, BatchShape(), prompts_of(views([Prompt(5.0, 600)] * 3)), Slo(ttft_ms, 40.0), NOW_S, budget
        )
        assert found == Turns(frozenset(), budget)


def test_decodes_are_of_the_budget_and_take_time() -> None:
    predictor = taught()
    for tokens in range(0, BUDGET, 128):
        batch = BatchShape(64, 64_000, tokens, tokens, 0, causal_pairs(tokens))
        for _ in range(8):
            predictor.observe(IterationRecord(batch, Mode.NONE, 20.0 + TOKEN_MS * tokens, 20.0 + TOKEN_MS * tokens))
    requests = views([Prompt(345.0, 500), Prompt(0.0, 2500)])  # 130 ms for 1,219 tokens at 0.1066 ms: in all 1,283
    assert take_turns(predictor, BatchShape(64, 64_000), prompts_of(requests), SLO, NOW_S, BUDGET).budget == 10 * 128
    requests = views([Prompt(345.0, 1219), Prompt(0.0, 1781)])
    assert take_turns(predictor, BatchShape(64, 64_000), prompts_of(requests), SLO, NOW_S, BUDGET).budget == 64 + 1219


def test_less_than_a_tile_is_as_much_as_there_is_time_for() -> None:
    assert turns(views([Prompt(470.0, 10), Prompt(0.0, 3000)])).budget == pytest.approx(50, abs=2)


def test_who_is_late_or_must_not_wait_bounds_no_batch() -> None:
    lower = Prompt(0.0, 900, 1)
    assert turns(views([Prompt(600.0, 100), Prompt(0.0, 3000), lower])).budget == BUDGET
    assert turns(views([Prompt(2100.0, 100), Prompt(0.0, 3000), lower])).budget == BUDGET
    again = RequestView("again", NOW_S - 2.0, NOW_S - 0.5, 3, num_prompt_tokens_left=100)
    assert turns((again, *views([Prompt(0.0, 3000), lower]))).budget == BUDGET


def test_who_gets_no_seat_bounds_no_batch() -> None:
    again = RequestView("again", NOW_S - 0.31, NOW_S - 0.2, 3, num_prompt_tokens_left=1000, has_begun=True)
    requests = (again, *views([Prompt(305.0, 100), Prompt(300.0, 100), Prompt(0.0, 3000)]))
    budgets = [turns(requests, num_seats=num_seats).budget for num_seats in (0, 1, 2)]
    assert budgets == [BUDGET, 13 * 128, 13 * 128], "who has begun needs none"


def test_who_waits_for_its_adapter_is_no_work() -> None:
    reading = RequestView("reading", NOW_S - 0.1, num_prompt_tokens_left=4000, waits_for_adapter=True)
    others = views([Prompt(50.0, 2000), Prompt(10.0, 2000)])
    assert last((reading, *others)) == frozenset()
    assert last((msgspec.structs.replace(reading, waits_for_adapter=False), *others)) == {"reading"}


def test_nobody_is_put_off_where_all_are_in_time() -> None:
    assert last(views([Prompt(0.0, 2000), Prompt(10.0, 2000), Prompt(200.0, 500)])) == frozenset()


def test_one_long_prompt_waits_for_those_that_it_would_make_late() -> None:
    assert last(views([Prompt(10.0, 3000), *[Prompt(5.0, 400)] * 5])) == {"0"}


def test_there_is_less_time_where_the_next_batch_begins_later() -> None:
    requests = views([Prompt(10.0, 3000), Prompt(5.0, 1500)])
    assert last(requests) == frozenset()
    assert last(requests, begins_ms=50.0) == {"0"}


def test_of_equal_prompts_who_came_last_waits() -> None:
    assert last(views([Prompt(30.0 - number, 2000) for number in range(4)])) == {"2", "3"}


def test_decodes_beside_prompts_and_their_adapters_take_time() -> None:
    predictor = taught()
    for num_adapters, more_ms in ((0, 20.0), (1, 60.0)):
        for tokens in (0, 1024, 2048, 3072):
            batch = BatchShape(8, 8000, tokens, tokens, num_adapters, causal_pairs(tokens))
            time_ms = TOKEN_MS * tokens + more_ms
            for _ in range(8):
                predictor.observe(IterationRecord(batch, Mode.NONE, time_ms, time_ms))

    def beside(num_adapters: int, tokens: int) -> frozenset[str]:
        decodes, requests = BatchShape(8, 8000, num_adapters=num_adapters), views([Prompt(5.0, tokens)] * 2)
        return take_turns(predictor, decodes, prompts_of(requests), SLO, NOW_S, BUDGET).put_off

    assert last(views([Prompt(5.0, 2310)] * 2)) == frozenset()
    assert beside(0, 2200) == frozenset()
    assert beside(0, 2310) == {"1"}
    assert beside(1, 2200) == {"1"}


@pytest.mark.parametrize(("waited_ms", "expected"), [(1900.0, {"0"}), (2100.0, {"1"})])
def test_nobody_is_put_off_for_ever(waited_ms: float, expected: set[str]) -> None:
    """It is late for good: four targets after it came it has its turn, also where that makes another late."""
    assert last(views([Prompt(waited_ms, 3000), Prompt(0.0, 2500)])) == expected


def test_who_had_its_first_token_is_not_put_off() -> None:
    """It was preempted, and running answers have their own target."""
    again = RequestView("again", NOW_S - 0.1, NOW_S - 0.05, 3, num_prompt_tokens_left=3000)
    assert last((again, *views([Prompt(50.0, 2000)]))) == {"0"}


def test_nobody_is_put_off_for_one_that_is_late_even_so() -> None:
    """Behind the one that must not wait: without the first it would be no earlier than its target either."""
    first, late = views([Prompt(100.0, 1000), Prompt(80.0, 500)])
    again = RequestView("again", NOW_S - 0.09, NOW_S - 0.05, 3, num_prompt_tokens_left=4000)
    assert last((first, again, late)) == {"1"}


def test_each_class_is_judged_behind_the_ones_before_it() -> None:
    requests = views([Prompt(0.0, 3000, 1), Prompt(0.0, 100, 1), Prompt(0.0, 3000, 0)])
    assert last(requests) == {"0"}
    requests = views([Prompt(0.0, 100, 1), Prompt(0.0, 100, 1), Prompt(0.0, 6000, 0), Prompt(0.0, 100, 0)])
    assert last(requests) == {"2", "0", "1"}


def test_where_nobody_knows_what_prompts_take_all_come_in_order() -> None:
    unknown = LatencyPredictor("simulated", "model")
    requests = views([Prompt(10.0, 30_000), Prompt(5.0, 400)])
    in_order = Turns(frozenset(), BUDGET)
    assert take_turns(unknown, BatchShape(), prompts_of(requests), SLO, NOW_S, BUDGET) == in_order
    no_room = take_turns(PREDICTOR, BatchShape(64, 64_000), prompts_of(requests), SLO, NOW_S, 64)
    assert no_room == Turns(frozenset(), 64), "no room for a token"
