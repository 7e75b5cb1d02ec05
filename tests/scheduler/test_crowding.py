"""Less of the target is aimed at where prompts take most of the device and first tokens come late in theirs."""

from __future__ import annotations

import math

import pytest

from cotenant.core.plan import BatchShape, IterationRecord, Mode, Slo
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.scheduler.crowding import Crowding, prompts_ms
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
    [(350.0, 0.1, 1.0), (35.0, 0.95, 1.0), (190.0, 0.5, 0.75), (400.0, 0.9, 0.5), (5000.0, 0.99, 0.5)],
)
def test_both_have_to_be_high(ttft_ms: float, prompt_share: float, most: float) -> None:
    """A long prompt that comes alone is late without any crowd; a full device whose first tokens are early has room."""
    found, now_s = crowding(ttft_ms, prompt_share)
    assert found.most(now_s) == pytest.approx(most, abs=0.01)


def test_it_is_over_soon() -> None:
    found, now_s = crowding(450.0, 0.9)
    values = [found.most(now_s + after_s) for after_s in (0.0, 2.0, 4.0, 10.0)]
    assert values == sorted(values)
    assert (values[0], values[-1]) == (0.5, 1.0)


def full(ttft_ms: float) -> Crowding:
    """A full device at 100 s, after a first token like that."""
    found = Crowding(SLO)
    found.prompts_took(1e6, 100.0)
    found.first_token(ttft_ms, 100.0)
    return found


@pytest.mark.parametrize(
    ("then_ms", "after_s", "most"),
    # The one in time after it tells nothing; it fades by half in 10 s; one that is late again counts from then on; none
    # counts for more than its whole target.
    [(10.0, 0.0, 0.75), (10.0, 10.0, 0.966), (200.0, 10.0, 0.5), (5000.0, 10.0, 0.5)],
)
def test_the_worst_of_the_latest_first_tokens_counts(then_ms: float, after_s: float, most: float) -> None:
    found = full(95.0)
    found.first_token(then_ms, 100.0 + after_s)
    found.prompts_took(1e6, 100.0 + after_s)
    assert found.most(100.0 + after_s) == pytest.approx(most, abs=0.001)


def test_a_first_token_that_is_ten_times_too_late_is_over_as_soon_as_others() -> None:
    found = full(5000.0)
    found.prompts_took(1e6, 120.0)
    assert found.most(120.0) == pytest.approx(0.614, abs=0.001), "a quarter is left of it"


@pytest.mark.parametrize(("step_ms", "most"), [(4.0, 0.5), (20.0, 0.8), (30.0, 0.95), (40.0, 1.0), (60.0, 1.0)])
def test_less_is_taken_off_where_steps_leave_little(step_ms: float, most: float) -> None:
    """Requests that are served alone get little further ahead."""
    margin, now_s = Margin(SLO), 100.0
    margin.expect_prompts(1.0, now_s, step_ms)
    margin.prompts_took(1e6, now_s)
    answer(margin, "late", now_s - 0.5, now_s)
    assert margin.aim(now_s) == pytest.approx(min(margin.value, most))


def test_only_what_prompts_take_beyond_the_decode_step_counts() -> None:
    predictor, batch = LatencyPredictor("test", "test"), BatchShape(8, 4000, 512, 512)
    assert prompts_ms(predictor, batch) == 0.0, "nobody knows"
    for _ in range(8):
        predictor.observe(IterationRecord(BatchShape(8, 4000), Mode.NONE, 10.0, 10.0))
        predictor.observe(IterationRecord(batch, Mode.NONE, 30.0, 30.0))
    assert prompts_ms(predictor, batch) == pytest.approx(20.0, abs=0.1)
    assert prompts_ms(predictor, BatchShape(8, 4000)) == 0.0


def test_nothing_is_taken_off_where_nothing_has_come() -> None:
    assert Crowding(SLO).most(0.0) == 1.0


def answer(margin: Margin, name: str, arrival_s: float, first_s: float, *, crowded_tpot_s: float = 0.0) -> None:
    """Of a hundred tokens; ``crowded_tpot_s``: while prompts fill the device all the time."""
    last_s = first_s + 100 * (crowded_tpot_s or 0.005)
    margin.arrived(name, arrival_s)
    margin.note(name, 1, first_s, is_over=False)
    margin.trained(1e6, last_s)
    if crowded_tpot_s:
        margin.prompts_took(1e6, last_s)
    margin.note(name, 100, last_s, is_over=True)
    margin.settle(last_s)


def test_the_margin_goes_by_it_and_learns_nothing_in_a_crowd() -> None:
    """What requests meet there says nothing of more, and what they miss is the crowd's."""
    margin, now_s = Margin(SLO), 100.0
    margin.begin_at(0.9)
    margin.prompts_took(1e6, now_s)
    answer(margin, "unknown", math.nan, now_s)
    assert (margin.aim(now_s), margin.has_learned) == (margin.value, True)
    answer(margin, "late", now_s - 0.45, now_s)
    assert margin.aim(now_s) == pytest.approx(0.5)
    before = margin.value
    answer(margin, "fast", now_s, now_s + 0.1)
    answer(margin, "slow", now_s, now_s + 0.1, crowded_tpot_s=0.05)
    assert margin.value == before
    now_s += 30.0
    assert margin.aim(now_s) == margin.value
    answer(margin, "fast again", now_s, now_s + 0.1)
    assert margin.value > before


def test_what_adapters_cost_a_step_is_no_time_of_prompts() -> None:
    predictor = LatencyPredictor("h", "m")
    decodes = BatchShape(4, 4000, num_adapters=8)
    whole = BatchShape(4, 4000, 512, 512, 8, 512 * 256)
    for _ in range(5):
        predictor.observe(IterationRecord(BatchShape(4, 4000), Mode.NONE, 5.0, 5.0))
        predictor.observe(IterationRecord(decodes, Mode.NONE, 8.0, 8.0))
        predictor.observe(IterationRecord(whole, Mode.NONE, 10.0, 10.0))
    assert prompts_ms(predictor, whole) == pytest.approx(2.0, rel=0.01)
