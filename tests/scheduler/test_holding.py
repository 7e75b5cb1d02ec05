"""What running requests have saved up is spent before a prompt joins them, as far as its TTFT target allows."""

from __future__ import annotations

import math

import pytest

from cotenant.core.plan import BatchShape, InFlight, IterationRecord, JobView, Mode, Plan, RequestView, Slo, Snapshot
from cotenant.core.tasklet import TaskletRun
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.scheduler import create_policy
from cotenant.scheduler.holding import held_ms
from taught import BACKWARD, DECODE, in_turn, taught_predictor

SLO = Slo(500.0, 20.0)
JOB = JobView("job", in_turn(TaskletRun(BACKWARD, 1000)))
# Takes 10 ms.
PROMPT = BatchShape(num_decode=4, context_tokens=400, prefill_tokens=64, prefill_context_tokens=64)
NEW = RequestView("new", arrival_s=100.0, num_prompt_tokens_left=64)


def running(saved_ms: float) -> RequestView:
    """Its next token is due in so long, at 0.9 of the target."""
    return RequestView("r", 90.0, 100.0 - 100 * 0.018 + saved_ms / 1e3, 100, has_begun=True)


def predictor() -> LatencyPredictor:
    found = taught_predictor(2.0, 1.0, 2.0)
    for _ in range(20):
        found.observe(IterationRecord(PROMPT, Mode.NONE, 10.0, 10.0))
    return found


def snapshot(
    *requests: RequestView,
    batch: BatchShape = PROMPT,
    slo: Slo = SLO,
    in_flight: InFlight | None = None,
    since_tokens_ms: float = 1.0,
    job: JobView | None = JOB,
) -> Snapshot:
    return Snapshot(
        100.0, slo, batch, requests, job, margin=0.9, num_ending=1, in_flight=in_flight, since_tokens_ms=since_tokens_ms
    )


def found_ms(*requests: RequestView, **others: object) -> float:
    return held_ms(predictor(), snapshot(*requests, **others))  # type: ignore[arg-type]


def test_tasklets_run_before_the_batch_for_as_long() -> None:
    planned = create_policy("adaptive", predictor()).plan(snapshot(running(41.0), NEW))
    assert planned == Plan(run_online=False, num_tasklets=15, hold_ms=pytest.approx(31.0), mode=Mode.TEMPORAL)


@pytest.mark.parametrize(("requests", "job"), [((running(40.0), NEW), None), ((running(12.0), NEW), JOB)])
def test_prompts_are_served_at_once_where_there_is_nothing_to_spend_or_nobody_to(
    requests: tuple[RequestView, ...], job: JobView | None
) -> None:
    assert create_policy("adaptive", predictor()).plan(snapshot(*requests, job=job)).run_online


@pytest.mark.parametrize(
    ("saved_ms", "expected_ms"),
    # The batch takes 10; too little is not worth it; the first token comes within 0.15 of its target.
    [(-5.0, 0.0), (14.0, 0.0), (16.0, 6.0), (30.0, 20.0), (90.0, 65.0)],
)
def test_the_most_urgent_request_has_its_token_in_time(saved_ms: float, expected_ms: float) -> None:
    found = found_ms(running(100.0), running(saved_ms), NEW, slo=Slo(500.0, 20.0, itl_ms=1e3))
    assert found == pytest.approx(expected_ms)


def test_who_comes_meanwhile_waits_no_longer_than_messages_may() -> None:
    assert found_ms(running(1000.0), NEW, slo=Slo(1e4, 20.0, itl_ms=1e3)) == 75.0


@pytest.mark.parametrize(("waited_ms", "expected_ms"), [(0.0, 65.0), (20.0, 45.0), (59.0, 6.0), (62.0, 0.0)])
def test_who_came_first_counts(waited_ms: float, expected_ms: float) -> None:
    first = RequestView("first", 100.0 - waited_ms / 1e3, num_prompt_tokens_left=64)
    batch = BatchShape(4, 400, 128, 128)
    found = predictor()
    for _ in range(20):
        found.observe(IterationRecord(batch, Mode.NONE, 10.0, 10.0))
    several = snapshot(running(1000.0), NEW, first, batch=batch, slo=Slo(500.0, 20.0, itl_ms=1e3))
    assert held_ms(found, several) == pytest.approx(expected_ms, abs=0.001)


@pytest.mark.parametrize(("since_tokens_ms", "expected_ms"), [(1.0, 49.0), (30.0, 20.0), (46.0, 0.0), (math.inf, 0.0)])
def test_no_gap_is_longer_than_is_allowed(since_tokens_ms: float, expected_ms: float) -> None:
    """Three targets, of which the batch takes 10 ms."""
    assert found_ms(running(1000.0), NEW, since_tokens_ms=since_tokens_ms) == pytest.approx(expected_ms)


@pytest.mark.parametrize(("num_left", "expected_ms"), [(64, 30.0), (128, 28.0), (192, 15.0), (256, 0.0)])
def test_prompts_of_several_batches_count_with_all_of_them(num_left: int, expected_ms: float) -> None:
    """Each takes 20 ms, 2 more than a token may, and all of the TTFT target's 75."""
    found = taught_predictor(2.0, 1.0, 2.0)
    for _ in range(20):
        found.observe(IterationRecord(PROMPT, Mode.NONE, 20.0, 20.0))
    new = RequestView("new", arrival_s=100.0, num_prompt_tokens_left=num_left)
    assert held_ms(found, snapshot(running(50.0), new)) == pytest.approx(expected_ms, abs=0.001)


def test_the_batch_in_flight_is_waited_for() -> None:
    """It takes 4 ms, and its token is there as well."""
    in_flight = InFlight(None, 4.0, DECODE)
    assert found_ms(running(30.0), NEW, in_flight=in_flight) == pytest.approx(30.0 + 18.0 - 4.0 - 10.0)
    # What there was before it is no part of the gap.
    far = found_ms(running(1000.0), NEW, in_flight=in_flight, since_tokens_ms=40.0)
    assert far == pytest.approx(60.0 - 10.0), "the longest gap, of which the batch takes 10"


@pytest.mark.parametrize(
    "other",
    [
        RequestView("begun", 99.0, num_prompt_tokens_left=64, has_begun=True),
        RequestView("again", 99.0, 99.1, 7, num_prompt_tokens_left=64),
        RequestView("landing", 99.0, has_begun=True),
    ],
)
def test_nobody_is_held_who_has_begun(other: RequestView) -> None:
    """Nor is anybody where a prompt has begun, or one's first token comes with the batch in flight."""
    assert found_ms(running(90.0), NEW) > 0.0
    assert found_ms(running(90.0), NEW, other) == 0.0


def test_who_waits_for_an_adapter_is_not_waited_for() -> None:
    loading = RequestView("loading", 90.0, num_prompt_tokens_left=64, waits_for_adapter=True)
    assert found_ms(running(40.0), NEW, loading) == pytest.approx(30.0)
    assert found_ms(running(40.0), loading, batch=DECODE) == 0.0


def test_nothing_is_held_where_nobody_runs_or_nobody_knows() -> None:
    assert found_ms(NEW, batch=BatchShape(0, 0, 64, 64)) == 0.0
    assert held_ms(LatencyPredictor("h", "m"), snapshot(running(90.0), NEW)) == 0.0
