"""Recorded arrivals in three formats."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.bench.traces import Trace, TraceRequest, read_trace
from cotenant.core.errors import InvalidInputError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2225000,879,55
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118.5,GPT-4,417,276,693,API log
"""
MOONCAKE = """{"timestamp": 0, "input_length": 6755, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3052, "input_length": 7319, "output_length": 490, "hash_ids": [0, 14, 15]}

{"timestamp": 2000, "input_length": 10, "output_length": 5}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_azure(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, AZURE))
    assert trace.format == "azure"
    assert [(one.input_len, one.output_len) for one in trace.requests] == [(374, 44), (396, 109), (879, 55)]
    assert [one.at_s for one in trace.requests] == pytest.approx([0.0, 4.314579, 4.54191], abs=1e-5)


def test_azures_times_are_the_same_in_every_zone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In New York the clocks went on by an hour at 2 that night."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    times = ("01:59:59", "02:00:01", "02:59:00", "03:00:00")
    rows = "".join(f"2024-03-10 {at},1,1\n" for at in times)
    try:
        trace = read_trace(write(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert [one.at_s for one in trace.requests] == [0.0, 2.0, 3541.0, 3601.0]


def test_burstgpt_skips_requests_that_had_failed(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, BURSTGPT))
    assert (trace.format, trace.num_skipped) == ("burstgpt", 1)
    assert trace.requests == [TraceRequest(0.0, 472, 18), TraceRequest(113.5, 417, 276)]


def test_mooncake_is_put_in_order(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, MOONCAKE))
    assert trace.format == "mooncake"
    assert trace.requests == [
        TraceRequest(0.0, 6755, 500, (0, 1, 2)),
        TraceRequest(2.0, 10, 5),
        TraceRequest(3.052, 7319, 490, (0, 14, 15)),
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "line 1: expected the header of an Azure trace"),
        ("a,b,c\n1,2,3\n", "line 1: expected the header of an Azure trace"),
        (AZURE + "2023-11-16 18:15:52,12\n", "line 5: there is no generatedtokens"),
        (AZURE + "yesterday,12,3\n", "line 5: timestamp is 'yesterday', which is not a time"),
        (AZURE + '"' + "x" * 200_000, "line 5: field larger than field limit"),
        (BURSTGPT + "120,GPT-4,-3,4,1,API log\n", "line 5: request tokens is '-3', which is not a count of tokens"),
        (BURSTGPT + "inf,GPT-4,3,4,7,API log\n", "line 5: the time 'inf' is not a finite number"),
        (MOONCAKE + "{oops\n", "line 5: JSON is malformed"),
        (MOONCAKE + '{"timestamp": 1, "input_length": "x", "output_length": 1}\n', "line 5: Expected 'int', got 'str'"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 1}\n', "line 5: Object missing required field 'output_length'"),
        ("Timestamp,Request tokens,Response tokens\n1,5,0\n", "holds no request with a prompt and an answer"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        read_trace(write(tmp_path, text))
    assert complaint in raised.value.message
    assert str(tmp_path) in raised.value.message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="cannot be read"):
        read_trace(tmp_path / "nothing")


def at(*seconds: float) -> Trace:
    return Trace("azure", [TraceRequest(second, 100, 10) for second in seconds])


def test_a_window_is_half_open_and_timed_from_its_start() -> None:
    window = at(0.0, 1.0, 1.5, 2.0).window(1.0, 2.0)
    assert [one.at_s for one in window.requests] == [0.0, 0.5]
    assert window.window_s == (1.0, 2.0)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40).map(sorted), st.integers(1, 20))
def test_no_window_holds_more_requests_than_the_busiest(seconds: list[int], length_s: int) -> None:
    trace = at(*map(float, seconds))
    start_s, end_s = trace.busiest(float(length_s))
    assert end_s - start_s == length_s
    most = max(sum(start <= second < start + length_s for second in seconds) for start in range(-20, 51))
    assert len(trace.window(start_s, end_s).requests) == most


def test_caps_cut_only_what_is_longer() -> None:
    trace = Trace("azure", [TraceRequest(0.0, 100, 10), TraceRequest(1.0, 5, 40)])
    assert [(one.input_len, one.output_len) for one in trace.capped(50, 20).requests] == [(50, 10), (5, 20)]
    assert trace.capped(None, None).requests == trace.requests


def test_a_trace_over_and_over_goes_on_at_its_rate() -> None:
    trace = Trace("azure", [TraceRequest(0.0, 5, 1), TraceRequest(4.0, 6, 2)])
    again = trace.repeated(3)
    assert [request.at_s for request in again.requests] == [0.0, 4.0, 8.0, 12.0, 16.0, 20.0]
    assert [request.input_len for request in again.requests] == [5, 6] * 3
    assert again.duration_s == 20.0
    chosen = Trace("azure", trace.requests, window_s=(30.0, 35.0)).repeated(2)
    assert [request.at_s for request in chosen.requests] == [0.0, 4.0, 5.0, 9.0]
    assert (chosen.duration_s, chosen.num_runs) == (10.0, 2)
    assert trace.repeated(1) == trace
    assert [request.at_s for request in Trace("azure", trace.requests[:1]).repeated(2).requests] == [0.0, 1.0]
