"""Prompt chunks follow the slack of those who are running."""

import itertools
from typing import Any

import pytest
from msgspec.structs import replace

from cotenant.core.plan import BatchShape, InFlight, IterationRecord, Mode, RequestView, Slo, causal_pairs
from cotenant.core.request import FinishReason
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.predictor.shapes import TILE
from cotenant.scheduler.answers import AnswerLengths
from cotenant.scheduler.base import prompts_of
from cotenant.scheduler.chunking import most_margin, prompt_budget, step_limit_ms

SLO = Slo(ttft_ms=500.0, tpot_ms=40.0)
LONG = 50  # tokens of a short answer, where few are shorter


def running(num_generated: int, elapsed_ms: float, now_s: float = 100.0) -> RequestView:
    return RequestView("r", now_s - 1, now_s - elapsed_ms / 1e3, num_generated)


def taught(ms_per_token: float = 0.025, decode_ms: float = 8.0) -> LatencyPredictor:
    predictor = LatencyPredictor("test", "test")
    for round_ in range(6):
        for num_decode in (4, 8, 16):
            for prompt in (0, 256, 1024, 2048):
                shape = BatchShape(num_decode, 500 * num_decode, prompt, prompt)
                took_ms = decode_ms + ms_per_token * prompt + 0.01 * round_
                predictor.observe(IterationRecord(shape, Mode.NONE, took_ms, took_ms))
    return predictor


def budget_of(
    predictor: LatencyPredictor, decodes: BatchShape, requests: tuple[RequestView, ...], *rest: Any, **named: Any
) -> int:
    return prompt_budget(predictor, decodes, requests, prompts_of(requests), *rest, **named)


def test_those_who_were_served_fast_have_time_to_give() -> None:
    fast = running(num_generated=20, elapsed_ms=200)  # 780 ms allowed, 200 used; cut to the largest gap
    assert step_limit_ms((fast,), SLO, 100.0, LONG) == 120.0
    late = running(num_generated=20, elapsed_ms=1000)
    assert step_limit_ms((fast, late), SLO, 100.0, LONG) == 36.0  # never less than what every step may take
    between = running(num_generated=20, elapsed_ms=700)
    assert step_limit_ms((fast, between), SLO, 100.0, LONG) == pytest.approx(80.0)


def test_a_batch_in_flight_takes_what_it_takes_first() -> None:
    """And it brings a token: else one chunk after the other would spend the same slack."""
    one = running(num_generated=20, elapsed_ms=700)
    limit_ms = step_limit_ms((one,), SLO, 100.0, LONG, ahead_ms=60.0, num_ahead=1)
    assert limit_ms == pytest.approx(80.0 - 60.0 + 0.975 * SLO.tpot_ms)


def test_how_long_a_batch_in_flight_takes_its_plan_says_or_the_predictor() -> None:
    predictor = taught()

    def budget(ahead: InFlight | None) -> int:
        one = running(num_generated=20, elapsed_ms=660)  # 120 ms
        return budget_of(predictor, BatchShape(8, 4000), (one,), SLO, 100.0, 4096, LONG, ahead)

    chunk = BatchShape(8, 4000, 2048, 2048)  # about 59 ms
    assert budget(InFlight(None, None, chunk)) == budget(InFlight(None, predictor.batch_ms(chunk))) < budget(None)
    assert budget(InFlight(None, None, BatchShape())) == budget(None), "nobody knows: as long as its tokens may take"


def test_who_ends_with_the_batch_in_flight_does_not_count() -> None:
    late = replace(running(num_generated=20, elapsed_ms=5000), max_tokens=21)
    assert step_limit_ms((late,), SLO, 100.0, LONG) == 36.0
    assert step_limit_ms((late,), SLO, 100.0, LONG, num_ahead=1) == 120.0


def test_waiting_and_new_requests_do_not_count() -> None:
    new = running(num_generated=15, elapsed_ms=5000)
    waiting = RequestView("w", 99.0)
    assert step_limit_ms((new, waiting), SLO, 100.0, LONG) == 120.0
    assert step_limit_ms((running(num_generated=16, elapsed_ms=5000), waiting), SLO, 100.0, LONG) == 36.0


def test_a_short_answer_counts_from_its_half() -> None:
    late = running(num_generated=4, elapsed_ms=5000)
    assert step_limit_ms((replace(late, max_tokens=9),), SLO, 100.0, LONG) == 36.0
    assert step_limit_ms((replace(late, max_tokens=10),), SLO, 100.0, LONG) == 120.0


def test_one_that_cannot_make_up_for_the_prompts_that_are_there_counts_from_its_first_token() -> None:
    first = replace(running(num_generated=1, elapsed_ms=0), max_tokens=6)  # 39 ms, and 31 in each of 4 gaps but a step

    def limit_ms(one: RequestView, prompts_ms: float, num_ahead: int = 0) -> float:
        return step_limit_ms((one,), SLO, 100.0, LONG, 0.0, num_ahead, step_ms=8.0, prompts_ms=prompts_ms)

    assert limit_ms(first, prompts_ms=75.0) == 120.0, "half of that"
    assert limit_ms(first, prompts_ms=80.0) == pytest.approx(39.0)
    assert limit_ms(first, prompts_ms=80.0, num_ahead=1) == 120.0, "there is a token more, and no time was taken for it"
    late = replace(first, first_token_s=99.8)
    assert limit_ms(late, prompts_ms=160.0) == 120.0, "whatever comes"
    assert limit_ms(replace(first, max_tokens=20), prompts_ms=160.0) == 120.0
    assert limit_ms(replace(first, max_tokens=None), prompts_ms=160.0) == 120.0


def test_one_whose_first_token_is_in_flight_counts_as_if_it_had_it() -> None:
    one = RequestView("r", 99.0, num_prompt_tokens_left=0, max_tokens=6, has_begun=True)

    def limit_ms(one: RequestView, num_ahead: int = 1) -> float:
        return step_limit_ms((one,), SLO, 100.0, LONG, 50.0 * num_ahead, num_ahead, step_ms=8.0, prompts_ms=80.0)

    assert limit_ms(one) == pytest.approx(39.0), "from the end of the batch in flight on, which takes it 50 ms"
    assert limit_ms(one, num_ahead=0) == 120.0
    assert limit_ms(replace(one, num_prompt_tokens_left=100)) == 120.0
    assert limit_ms(replace(one, has_begun=False)) == 120.0, "it was not even let in"
    assert limit_ms(replace(one, max_tokens=1)) == 120.0
    assert limit_ms(replace(one, max_tokens=None)) == 120.0, "a long one has time"


def test_where_prompts_have_no_time_it_gives_half_of_what_it_can_make_up_for() -> None:
    first = replace(running(num_generated=1, elapsed_ms=0), max_tokens=6)

    def limit_ms(one: RequestView, num_ahead: int = 0) -> float:
        return step_limit_ms((one,), SLO, 100.0, LONG, 0.0, num_ahead, step_ms=8.0, prompts_ms=0.0)

    assert limit_ms(first) == pytest.approx(8.0 + (39.0 - 8.0 + 4 * 31.0) / 2)
    assert limit_ms(replace(first, num_generated=2), num_ahead=1) == pytest.approx(117.0), "its slack is more than that"
    assert limit_ms(replace(first, first_token_s=99.8)) == 120.0, "it is late whatever comes"
    assert limit_ms(replace(first, max_tokens=20)) == 120.0, "half of it is more than the longest gap"


def test_prompts_go_by_small_chunks_for_it_only_where_they_are_in_time_then() -> None:
    predictor, decodes = taught(), BatchShape(8, 4000)
    first = replace(running(num_generated=1, elapsed_ms=0), max_tokens=6)

    def budget(num_prompts: int, waited_s: float, one: RequestView = first) -> int:
        prompt = RequestView("p", 100.0 - waited_s, num_prompt_tokens_left=3000)  # three steps, 75 ms beside others
        return budget_of(predictor, decodes, (one, *[prompt] * num_prompts), SLO, 100.0, 4096, LONG)

    small, half, large = 1280, 3072, 4096
    assert budget(1, 0.0) == large, "it can make up for one"
    assert budget(2, 0.0) == small
    assert budget(2, 0.3) == half, "the second one would be late"
    assert (budget(4, 0.0), budget(5, 0.0)) == (small, half)
    assert budget(2, 0.0, replace(first, max_tokens=None)) == large, "its answer is long"


def test_who_had_a_first_token_waits_for_none_where_a_prompt_is_computed_again() -> None:
    """As it is for one that was preempted: its prompt takes time, and when it came is long ago."""
    predictor, decodes = taught(), BatchShape(8, 4000)
    first = replace(running(num_generated=1, elapsed_ms=0), max_tokens=6)
    preempted = RequestView("p", 90.0, 99.0, num_generated=50, num_prompt_tokens_left=8000)
    waiting = RequestView("w", 100.0, num_prompt_tokens_left=100)
    budgets = [
        budget_of(predictor, decodes, (*requests, waiting), SLO, 100.0, 4096, LONG)
        for requests in ((first,), (first, preempted))
    ]
    assert budgets == [4096, 1280]


def test_where_answers_are_short_slack_counts_sooner() -> None:
    """They end before they have caught up."""
    late = running(num_generated=4, elapsed_ms=5000)
    assert step_limit_ms((late,), SLO, 100.0, LONG) == 120.0
    assert step_limit_ms((late,), SLO, 100.0, short=8) == 36.0
    first = running(num_generated=1, elapsed_ms=5000)
    assert step_limit_ms((first,), SLO, 100.0, short=6) == 120.0
    assert step_limit_ms((replace(first, max_tokens=2),), SLO, 100.0, LONG) == 36.0, "its only gap"


def test_short_is_what_a_twentieth_of_the_latest_answers_falls_short_of() -> None:
    lengths = AnswerLengths()

    def end(num_tokens: int, count: int, reason: FinishReason = FinishReason.STOP) -> None:
        for _ in range(count):
            lengths.ended(num_tokens, reason)

    end(100, 304, FinishReason.LENGTH)
    assert lengths.short == 100
    end(6, 5)
    end(200, 3)
    assert lengths.short == 100, "a few"
    end(1, 64, FinishReason.LENGTH)
    end(2, 64, FinishReason.ABORT)
    assert lengths.short == 100, "they did not end by themselves"
    end(6, 24)
    assert lengths.short == 6
    end(40, 256)
    assert lengths.short == 40, "what is long ago is forgotten"


def test_least_is_what_hardly_any_answer_falls_short_of_if_it_was_given_up() -> None:
    lengths = AnswerLengths()

    def end(num_tokens: int, count: int, reason: FinishReason = FinishReason.STOP) -> None:
        for _ in range(count):
            lengths.ended(num_tokens, reason)

    end(100, 31)
    assert lengths.least == 0, "too few to tell"
    end(100, 9)
    assert lengths.least == 100
    end(5, 8, FinishReason.LENGTH)
    assert lengths.least == 100, "their own limit"
    end(7, 1, FinishReason.ABORT)
    end(100, 7)
    assert lengths.least == 5, "some tokens were on their way"
    end(100, 80)
    assert (lengths.least, lengths.short) == (100, 100), "one of more than a hundred"


def test_where_requests_are_late_a_batch_has_whole_tiles_too() -> None:
    late = (running(num_generated=20, elapsed_ms=1000),)
    budgets = [
        budget_of(taught(decode_ms=38.0), BatchShape(count, 4000), late, SLO, 100.0, 4096, LONG)
        for count in (8, 65, 200)
    ]
    assert budgets == [128, 256, 384]
    assert budget_of(taught(decode_ms=38.0), BatchShape(8, 4000), late, SLO, 100.0, most=100, short=LONG) == 100


def test_a_budget_fills_the_limit() -> None:
    predictor = taught()
    late = (running(num_generated=20, elapsed_ms=1000),)
    budget = budget_of(predictor, BatchShape(8, 4000), late, SLO, 100.0, most=4096, short=LONG)
    assert (36.0 - 8.0) / 0.025 - TILE < budget - 8 <= (36.0 - 8.0) / 0.025 + TILE / 4 + 1
    assert budget % TILE == 0, "decodes included: no row is computed for nothing"
    fast = (running(num_generated=20, elapsed_ms=100),)
    assert budget_of(predictor, BatchShape(8, 4000), fast, SLO, 100.0, most=4096, short=LONG) == 4096


@pytest.mark.parametrize("most", [200, 2000, 2048, 3000])
def test_a_budget_without_a_target_is_all_that_a_batch_may_have(most: int) -> None:
    late = (running(num_generated=20, elapsed_ms=1000),)
    assert budget_of(taught(), BatchShape(8, 4000), late, Slo(1e9, 1e9), 100.0, most, LONG) == most


def test_what_it_takes_to_begin_is_taken_off_what_requests_are_ahead() -> None:
    """Not off what every step may take."""
    predictor, decodes = taught(), BatchShape(8, 4000)

    def tokens(elapsed_ms: float, begins_after_ms: float, ahead: InFlight | None = None) -> int:
        one = running(num_generated=20, elapsed_ms=elapsed_ms)
        return budget_of(predictor, decodes, (one,), SLO, 100.0, 4096, LONG, ahead, begins_after_ms)

    in_flight = InFlight(None, 8.0, decodes)
    assert tokens(680.0, 10.0) == tokens(690.0, 0.0) < tokens(680.0, 0.0)
    assert tokens(1000.0, 10.0) == tokens(1000.0, 0.0)
    assert tokens(680.0, 10.0, in_flight) == tokens(680.0, 0.0, in_flight), "the device has work meanwhile"


def test_prompts_are_never_shut_out() -> None:
    late = (running(num_generated=20, elapsed_ms=1000),)
    assert budget_of(taught(decode_ms=38.0), BatchShape(8, 4000), late, SLO, 100.0, most=4096, short=LONG) == TILE


def test_where_decodes_alone_are_too_late_first_tokens_do_not_wait_for_them() -> None:
    """No chunk is small enough for these: as much as steps are late, up to a quarter of them, goes to prompts."""
    late = (running(num_generated=20, elapsed_ms=3000),)

    def tokens(decode_ms: float) -> int:
        return budget_of(taught(decode_ms=decode_ms), BatchShape(8, 4000), late, SLO, 100.0, 4096, LONG)

    assert tokens(39.0) == TILE, "in time by a little"
    found = [tokens(decode_ms) for decode_ms in (41.0, 45.0, 50.0, 60.0, 100.0, 400.0)]
    assert found == sorted(found)
    assert found[0] == TILE
    for decode_ms, budget in zip((60.0, 100.0), found[3:5], strict=True):
        assert 0.15 * decode_ms / 0.025 < budget < 0.25 * decode_ms / 0.025


def test_nothing_is_limited_by_what_is_not_known_or_not_there() -> None:
    late = (running(num_generated=20, elapsed_ms=1000),)
    assert budget_of(LatencyPredictor("t", "t"), BatchShape(8, 4000), late, SLO, 100.0, most=4096, short=LONG) == 4096
    assert budget_of(taught(), BatchShape(), (), SLO, 100.0, most=4096, short=LONG) == 4096


def test_training_leaves_prompts_a_little_more_where_steps_are_long_against_the_target() -> None:
    margins = [most_margin(SLO, step_ms) for step_ms in (0.0, 5.0, 20.0, 40.0, 80.0)]
    assert margins == sorted(margins, reverse=True)
    assert len(set(margins)) == 4, "no step counts as longer than the target"
    aimed_at_ms = margins[1] * SLO.tpot_ms
    answer = running(num_generated=400, elapsed_ms=400 * aimed_at_ms)
    assert step_limit_ms((answer,), SLO, 100.0, LONG) > 400 * 0.1, (
        "what training left in each token is there for prompts"
    )


def test_what_a_prompt_has_computed_takes_time_of_the_chunk_that_attends_to_it() -> None:
    """But of that of others behind it: a chunk that ends the prompt soon has few tokens that do."""
    predictor, decodes = LatencyPredictor("test", "test"), BatchShape(8, 4000)
    for tokens, computed in itertools.product((0, 256, 512, 1024, 2048), (0, 1000, 4000)):
        pairs = causal_pairs(tokens, computed)
        shape = BatchShape(8, 4000, tokens, tokens + computed if tokens else 0, prefill_pairs=pairs if tokens else 0)
        took_ms = 8.0 + 0.022 * tokens + 1e-6 * shape.prefill_pairs
        for _ in range(4):
            predictor.observe(IterationRecord(shape, Mode.NONE, took_ms, took_ms))

    def budget(num_left: int, num_computed: int) -> int:
        views = (
            running(num_generated=20, elapsed_ms=700),  # 80 ms
            RequestView("p", 99.9, None, num_prompt_tokens_left=num_left, num_computed=num_computed),
            RequestView("q", 99.9, None, num_prompt_tokens_left=4000),
        )
        return budget_of(predictor, decodes, views, SLO, 100.0, 8192, LONG)

    fresh, half_done = budget(4000, 0), budget(4000, 4000)
    for tokens, computed in ((fresh - 8, 0), (half_done - 8, 4000)):
        took_ms = 8.0 + 0.022 * tokens + 1e-6 * causal_pairs(tokens, computed)
        assert took_ms == pytest.approx(80.0, rel=0.05)
    assert half_done < budget(256, 4000) <= fresh
