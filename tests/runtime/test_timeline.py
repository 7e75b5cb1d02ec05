"""Where the device's time went, interval by interval."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.plan import BatchShape, IterationRecord, Mode, Partition
from cotenant.core.tasklet import TaskletKind, TaskletRun, TaskletShape
from cotenant.runtime.timeline import MOST_POINTS, Timeline

RUN = TaskletRun(TaskletShape(TaskletKind.FORWARD, 64), 2)
DECODE = BatchShape(num_decode=4)
SHARES = ("online_share", "fused_share", "best_effort_share")


def test_tenants_take_turns() -> None:
    timeline = Timeline()
    for index in range(4):
        record = IterationRecord(DECODE, Mode.TEMPORAL, online_ms=250.0, total_ms=1000.0, tasklets=((RUN, 500.0),))
        timeline.note(index + 1.0, record)
    figures = timeline.figures(0.0, 4.0)
    assert figures["seconds"] == [1.0, 2.0, 3.0, 4.0]
    assert figures["online_share"] == [0.25] * 4
    assert figures["best_effort_share"] == [0.5] * 4
    assert figures["fused_share"] == [0.0] * 4
    assert figures["mode"] == ["temporal"] * 4
    assert figures["step_ms"] == figures["longest_step_ms"] == [1000.0] * 4


def test_a_partition_and_a_fused_batch() -> None:
    timeline = Timeline(num_sms=100)
    beside = IterationRecord(
        DECODE, Mode.SPATIAL, 800.0, 1000.0, ((RUN, 200.0),), partition=Partition(60, 40), beside=((RUN, 400.0),)
    )
    timeline.note(1.0, beside)
    timeline.note(2.0, IterationRecord(DECODE, Mode.FUSED, 700.0, 1000.0, fused=RUN))
    figures = timeline.figures(0.0, 2.0)
    assert figures["online_share"] == [0.48, 0.0]
    assert figures["best_effort_share"] == [pytest.approx(0.2 + 0.4 * 0.4), 0.0]
    assert figures["fused_share"] == [0.0, 0.7]
    assert figures["mode"] == ["spatial", "fused"]


def test_an_idle_device_has_no_steps() -> None:
    timeline = Timeline()
    assert timeline.figures(0.0, 2.0)["step_ms"] == [None]
    timeline.note(1.0, IterationRecord(BatchShape(), Mode.NONE, 0.0, 1000.0))
    figures = timeline.figures(0.0, 2.0)
    assert (figures["step_ms"], figures["mode"], figures["online_share"]) == ([None], ["none"], [0.0])


@given(
    st.lists(st.tuples(st.floats(1e-5, 3.0), st.floats(0.0, 500.0)), min_size=1, max_size=300),
    st.floats(0.0, 1e3),
    st.floats(0.0, 1.0),
)
def test_all_tokens_of_the_time_are_in_the_timeline(
    rows: list[tuple[float, float]], start_s: float, after_s: float
) -> None:
    """Iterations may be far shorter than what times are rounded to, and the last may end with the time itself."""
    timeline, now_s, tokens = Timeline(), start_s, 1e4
    timeline.note_tokens(now_s, tokens)
    for seconds, trained in rows:
        now_s, tokens = now_s + seconds, tokens + trained
        timeline.note(now_s, IterationRecord(BatchShape(), Mode.TEMPORAL, 0.0, seconds * 1e3, ((RUN, seconds * 1e3),)))
        timeline.note_tokens(now_s, tokens)
    end_s = now_s + after_s
    figures = timeline.figures(start_s, end_s)
    assert figures["trained_tokens"] == sorted(figures["trained_tokens"])
    assert figures["trained_tokens"][-1] == pytest.approx(tokens - 1e4, abs=0.1)
    assert timeline.tokens_per_s(start_s, end_s) == pytest.approx((tokens - 1e4) / (end_s - start_s))


def test_training_counts_for_as_long_as_it_is_timed() -> None:
    """From its first iteration on, and of the last what ran until the end."""
    timeline = Timeline()
    for at_s, tokens in ((0.5, 100.0), (1.5, 180.0), (2.5, 220.0), (4.5, 300.0)):
        timeline.note_tokens(at_s, tokens)
    assert timeline.tokens_per_s(0.6, 2.5) == pytest.approx(120.0 / 1.9), "nothing ran between the note and the start"
    assert timeline.tokens_per_s(0.5, 3.5) == pytest.approx(160.0 / 3.0)
    assert timeline.tokens_per_s(1.5, 9.5) == pytest.approx(120.0 / 8.0)
    assert timeline.tokens_per_s(0.0, 2.5) == pytest.approx(120.0 / 2.5), "there was none before"
    assert timeline.figures(0.6, 3.5)["trained_tokens"] == [160.0]
    assert Timeline().tokens_per_s(0.0, 1.0) == 0.0


@given(
    st.lists(
        st.tuples(st.floats(0.01, 3000), st.floats(0, 1), st.floats(0, 2), st.booleans()), min_size=1, max_size=300
    ),
    st.floats(0.0, 0.9),
)
def test_no_time_is_lost_or_counted_twice(rows: list[tuple[float, float, float, bool]], start: float) -> None:
    """One iteration after the other, in whatever window: shares of a point are at most the whole, and their sum over
    the window is what the iterations took in it."""
    timeline, now_s, num_steps, ends_s = Timeline(), 0.0, 0, []
    for total_ms, online, tasklets, has_batch in rows:
        now_s += total_ms / 1e3
        batch = DECODE if has_batch else BatchShape()
        online_ms = online * total_ms if has_batch else 0.0
        record = IterationRecord(batch, Mode.TEMPORAL, online_ms, total_ms, ((RUN, tasklets * total_ms),))
        timeline.note(now_s, record)
        ends_s.append((now_s, total_ms, online_ms))
        num_steps += has_batch
    start_s = start * now_s
    figures = timeline.figures(start_s, now_s)
    assert 1 <= len(figures["seconds"]) <= MOST_POINTS
    assert all(
        len(figures[name]) == len(figures["seconds"]) for name in (*SHARES, "step_ms", "longest_step_ms", "mode")
    )
    for point in zip(*(figures[name] for name in SHARES), strict=True):
        assert sum(point) <= 1.002
    measured_s = sum(figures["online_share"]) / len(figures["seconds"]) * (now_s - start_s)
    overlaps = (
        min(1.0, max(0.0, (end_s - start_s) * 1e3 / total_ms)) * online_ms for end_s, total_ms, online_ms in ends_s
    )
    assert measured_s == pytest.approx(sum(overlaps) / 1e3, abs=1e-3 * (now_s - start_s) + 1e-6)
