"""Counting events, however the bytes are cut and whatever the answer says."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.bench.event_stream import EventStream


def event(content: object, spaced: bool = False) -> bytes:
    separators = None if spaced else (",", ":")
    return b"data: " + json.dumps(content, separators=separators).encode() + b"\n\n"


def choice(text: str) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text}], "usage": None}


USAGE = {"prompt_tokens": 7, "completion_tokens": 12, "prompt_tokens_details": {"cached_tokens": 3}}
HOSTILE = ['"choices":[{', '\\"choices": [{', "data: [DONE]\n\n", 'x"}],"usage":{"completion_tokens":99}', "ü\n"]


@given(
    st.lists(st.one_of(st.text(max_size=8), st.sampled_from(HOSTILE)), max_size=12),
    st.booleans(),
    st.lists(st.integers(1, 60), min_size=1, max_size=30),
)
def test_chunks_are_counted_however_the_bytes_are_cut(texts: list[str], spaced: bool, sizes: list[int]) -> None:
    data = b": a comment\n\n" + b"".join(event(choice(text), spaced) for text in texts)
    data += event({"choices": [], "usage": USAGE}, spaced) + b"data: [DONE]\n\n"
    stream, position, now_s = EventStream(), 0, 0
    while position < len(data):
        size = sizes[now_s % len(sizes)]
        stream.feed(data[position : position + size], float(now_s))
        position, now_s = position + size, now_s + 1
    stream.finish()
    assert len(stream.times) == len(texts)
    assert list(stream.times) == sorted(stream.times)
    assert stream.is_done
    assert stream.error is None
    assert stream.usage is not None
    assert (stream.usage.prompt_tokens, stream.usage.completion_tokens, stream.usage.cached_tokens) == (7, 12, 3)


def test_usage_may_come_with_the_last_choice() -> None:
    stream = EventStream()
    stream.feed(event(choice("a")) + event({**choice("b"), "usage": USAGE}) + b"data: [DONE]\n\n", 1.0)
    stream.finish()
    assert stream.usage is not None
    assert stream.usage.completion_tokens == 12


def test_lines_may_end_with_carriage_returns() -> None:
    stream = EventStream()
    stream.feed(event(choice("a")).replace(b"\n", b"\r\n") + b"data: [DONE]\r\n\r\n", 1.0)
    assert (len(stream.times), stream.is_done) == (1, True)


@pytest.mark.parametrize("error", [{"message": "the worker died", "code": 500}, "the worker died"])
def test_an_error_event_is_kept(error: object) -> None:
    stream = EventStream()
    stream.feed(event(choice("a")) + event({"error": error}), 1.0)
    assert stream.error == "the worker died"
    assert not stream.is_done


def test_an_event_that_is_not_json_is_an_error() -> None:
    with pytest.raises(msgspec.DecodeError):
        EventStream().feed(b"data: {oops\n\n", 1.0)
