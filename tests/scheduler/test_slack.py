"""Slack per request."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.plan import MAX_GAP_TARGETS, RequestView, Slo
from cotenant.scheduler.chunking import most_margin
from cotenant.scheduler.slack import MOST_MARGIN, SAFETY, decode_slack_ms, first_token_slack_ms, token_slack_ms

SLO = Slo(ttft_ms=100.0, tpot_ms=10.0)


def running(first_token_s: float, num_generated: int) -> RequestView:
    return RequestView("r", first_token_s - 0.01, first_token_s, num_generated)


def test_a_request_served_fast_has_time_to_give_and_a_slow_one_has_none() -> None:
    on_time = decode_slack_ms((running(10.0, 11),), SLO, now_s=10.08, step_ms=1.0)
    fast = decode_slack_ms((running(10.0, 13),), SLO, now_s=10.08, step_ms=1.0)
    late = decode_slack_ms((running(10.0, 3),), SLO, now_s=10.08, step_ms=1.0)
    assert late < 0 < on_time < fast


def test_the_most_urgent_request_decides() -> None:
    views = (running(10.0, 13), running(10.0, 3))
    assert decode_slack_ms(views, SLO, 10.08, 1.0) == decode_slack_ms(views[1:], SLO, 10.08, 1.0)


def test_the_gap_between_two_tokens_is_capped_whatever_was_saved_up() -> None:
    slack = decode_slack_ms((running(10.0, 1000),), SLO, now_s=10.08, step_ms=1.0)
    assert slack == MAX_GAP_TARGETS * SLO.tpot_ms - 1.0
    shorter = decode_slack_ms((running(10.0, 1000),), replace(SLO, itl_ms=12.0), now_s=10.08, step_ms=1.0)
    assert shorter == 11.0


@given(
    gaps=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=60),
    step_ms=st.floats(0.1, 3.0),
)
def test_a_request_whose_slack_is_never_overdrawn_meets_its_tpot_target(gaps: list[float], step_ms: float) -> None:
    """Play decode steps with tasklets that use any share of the slack between them."""
    now, first, generated = 100.0, 100.0, 1
    for share in gaps:
        slack = decode_slack_ms((running(first, generated),), SLO, now, step_ms)
        now += step_ms / 1e3  # the step; its token leaves now
        generated += 1
        tpot_ms = (now - first) / (generated - 1) * 1e3
        assert tpot_ms <= max(SAFETY * SLO.tpot_ms, step_ms) + 1e-6
        now += max(0.0, slack) * share / 1e3  # the tasklets


def test_a_long_answer_keeps_little_more_than_a_token_where_the_margin_is_at_its_end() -> None:
    slo, now_s, step_ms = Slo(500.0, 10.0, 1e6), 100.0, 4.0

    def due_ms(num_gaps: int, margin: float) -> float:
        """Of the token that tasklets delay, after the first one."""
        view = running(now_s - 1.0, num_gaps - 1)
        return decode_slack_ms((view,), slo, now_s, step_ms, margin) + 2 * step_ms + 1000

    most = [due_ms(num_gaps, MOST_MARGIN) for num_gaps in range(2, 1000)]
    assert most[8] == pytest.approx(98), "of a short one it keeps its share"
    assert most[398] == pytest.approx(3978)
    gaps = [after - before for before, after in itertools.pairwise(most)]
    assert all(9.8 - 1e-6 < gap < 9.98 for gap in gaps), "nothing jumps, and any stretch is in time by itself"
    assert due_ms(400, 0.9799) == pytest.approx(3919.6), "something has been missed: its share is kept"


def test_such_an_answer_may_end_with_a_step_like_the_others() -> None:
    slo, now_s = Slo(500.0, 10.0), 100.0
    last = RequestView("last", 90.0, first_token_s=now_s - 3.98, num_generated=400, max_tokens=401)
    assert token_slack_ms((last,), slo, now_s, MOST_MARGIN) == pytest.approx(15)
    assert token_slack_ms((last,), slo, now_s, 0.97) == pytest.approx(3900 - 3980)


def test_the_token_of_a_request_that_may_end_with_it_is_due_itself() -> None:
    slo, now_s = Slo(500.0, 20.0), 100.0
    last = RequestView("last", 99.0, first_token_s=99.9, num_generated=9, max_tokens=10)
    long = RequestView("long", 99.0, first_token_s=99.9, num_generated=50, max_tokens=400)
    fresh = RequestView("fresh", 99.0, first_token_s=99.99, num_generated=1, max_tokens=400)
    old = RequestView("old", 99.0, first_token_s=99.0, num_generated=200)
    assert token_slack_ms((last, long, old), slo, now_s, 0.5) == pytest.approx(9 * 19.5 - 100), "nothing comes after it"
    assert token_slack_ms((fresh, old), slo, now_s, 0.9) == pytest.approx(18 - 10)
    assert token_slack_ms((long, old), slo, now_s, 1.0) == math.inf
    assert token_slack_ms((fresh, old), slo, now_s, 0.9, least=2) == pytest.approx(18 - 10), "it may have two"
    assert token_slack_ms((fresh, old), slo, now_s, 0.9, least=3) == math.inf
    assert token_slack_ms((fresh, old), slo, now_s, 0.9, num_ahead=1, least=3) == pytest.approx(36 - 10)
    assert token_slack_ms((last,), slo, now_s, 1.0, least=20) == pytest.approx(9 * 19.5 - 100), "it ends by its limit"
    short = RequestView("short", 99.0, first_token_s=99.96, num_generated=3, max_tokens=4)
    assert token_slack_ms((short,), slo, now_s, 0.9, least=20) == pytest.approx(3 * 18 - 40)
    # With a batch in flight the tokens after those are meant.
    nearly = msgspec.structs.replace(last, num_generated=8)
    assert token_slack_ms((nearly,), slo, now_s, 1.0, num_ahead=1) == pytest.approx(9 * 19.5 - 100)
    assert token_slack_ms((nearly,), slo, now_s, 1.0) == math.inf
    assert token_slack_ms((last, short), slo, now_s, 1.0, num_ahead=1) == math.inf, "they have no token in this batch"


def test_an_answer_that_is_on_time_ends_with_a_step_like_the_others() -> None:
    """Who has taken as long a token as may be aimed at may take as long over the last one."""
    slo, now_s = Slo(500.0, 20.0), 100.0
    token_ms = most_margin(slo, step_ms=0.0) * slo.tpot_ms
    last = RequestView("last", 99.0, first_token_s=now_s - 8 * token_ms / 1e3, num_generated=9, max_tokens=10)
    assert token_slack_ms((last,), slo, now_s, 0.9) > token_ms - 1e-6


def test_who_waits_has_the_slack_of_the_one_that_came_first() -> None:
    late, new = RequestView("late", 99.99), RequestView("new", 99.995, num_prompt_tokens_left=7)
    assert first_token_slack_ms((new, late, running(90.0, 5)), SLO, 100.0, 20.0) == pytest.approx(100 - 10 - 20)
    assert first_token_slack_ms((late,), SLO, 100.2, 20.0) == pytest.approx(100 - 210 - 20), "late"
    assert first_token_slack_ms((running(90.0, 5),), SLO, 100.0, 20.0) == math.inf


VIEWS = st.builds(
    RequestView,
    st.just("r"),
    st.just(9.0),
    st.one_of(st.none(), st.floats(9.0, 10.0)),
    st.integers(0, 60),
    max_tokens=st.one_of(st.none(), st.integers(1, 60)),
)


@given(st.lists(VIEWS, min_size=1, max_size=8).map(tuple), st.integers(0, 1))
def test_requests_have_the_slack_of_the_one_that_has_least(views: tuple[RequestView, ...], num_ahead: int) -> None:
    """Whether they wait for their first token, may end soon, or neither."""
    decode_ms = [decode_slack_ms((view,), SLO, 10.0, 1.0) for view in views]
    assert decode_slack_ms(views, SLO, 10.0, 1.0) == min(decode_ms)
    token_ms = [token_slack_ms((view,), SLO, 10.0, 0.9, num_ahead) for view in views]
    assert token_slack_ms(views, SLO, 10.0, 0.9, num_ahead) == min(token_ms)
