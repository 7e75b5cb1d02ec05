"""Framing of events, and clients that leave."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect

from cotenant.api.schemas.chat import ChatChunk, ChunkChoice, Delta, PromptTokensDetails, Usage
from cotenant.api.sse import DONE, EventStreamResponse, TextEvents, event, run_until_disconnect
from cotenant.core.errors import WorkerLostError

CHUNK = ChatChunk("chatcmpl-1", 5, "m", [ChunkChoice(0, Delta(content="a\nb"))])


def test_an_event_is_one_line_of_json() -> None:
    data = event(CHUNK)
    assert data.startswith(b"data: {")
    assert data.endswith(b"}\n\n")
    assert data.count(b"\n") == 2


def test_usage_is_absent_null_or_there() -> None:
    usage = Usage(1, 2, 3, PromptTokensDetails(0))
    assert b"usage" not in event(CHUNK)
    assert b'"usage":null' in event(ChatChunk("c", 5, "m", [], usage=None))
    assert b'"usage":{"prompt_tokens":1' in event(ChatChunk("c", 5, "m", [], usage=usage))


def test_an_empty_delta_is_empty() -> None:
    assert b'"delta":{},' in event(ChatChunk("c", 5, "m", [ChunkChoice(0, Delta(), None, "stop")]))


@given(st.text())
def test_events_that_differ_in_their_text_are_as_if_each_was_encoded(text: str) -> None:
    def make(content: str) -> ChatChunk:
        return ChatChunk('"c\\', 5, "m/\u00e9", [ChunkChoice(1, Delta(content=content))], usage=None)

    assert TextEvents(make)(text) == event(make(text))


async def _never() -> Any:
    await asyncio.Event().wait()


async def _gone() -> Any:
    await asyncio.sleep(0.01)
    return {"type": "http.disconnect"}


def test_work_that_ends_first_gives_its_result() -> None:
    async def work() -> int:
        return 5

    assert asyncio.run(run_until_disconnect(_never, work())) == 5


def test_work_that_fails_raises_its_error() -> None:
    async def work() -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(run_until_disconnect(_never, work()))


def test_work_is_cleaned_up_before_a_disconnect_is_reported() -> None:
    cleaned = []

    async def work() -> None:
        try:
            await _never()
        finally:
            await asyncio.sleep(0.01)  # telling the worker takes a moment
            cleaned.append(True)

    with pytest.raises(ClientDisconnect):
        asyncio.run(run_until_disconnect(_gone, work()))
    assert cleaned == [True]


def _stream(events: Any, receive: Any, is_followed: Any = lambda: False) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        await EventStreamResponse("req-1", b"first", events(), is_followed)({"type": "http"}, receive, send)

    asyncio.run(run())
    return sent


def test_a_stream_ends_with_done() -> None:
    async def events() -> Any:
        yield b"second"

    sent = _stream(events, _never)
    assert (b"content-type", b"text/event-stream; charset=utf-8") in sent[0]["headers"]
    assert [message["body"] for message in sent[1:]] == [b"first", b"second", DONE]
    assert [message["more_body"] for message in sent[1:]] == [True, True, False]


@pytest.mark.parametrize("fails", [False, True])
def test_what_came_together_leaves_together_and_nothing_is_lost(fails: bool) -> None:
    waiting = [b"5", b"", b"4", b"3", b"", b"2"]

    async def events() -> Any:
        while waiting:
            yield waiting.pop()
        if fails:
            raise WorkerLostError("The worker died.")

    sent = [message["body"] for message in _stream(events, _never, lambda: len(waiting) not in (4, 3, 1))[1:]]
    assert sent[:4] == [b"first", b"2", b"3", b"4"]
    assert len(sent) == 5
    assert sent[4].startswith(b'5data: {"error"' if fails else b"5" + DONE)


@pytest.mark.parametrize(
    ("error", "text", "code"),
    [(WorkerLostError("The worker died.", code="worker_lost"), b"The worker died.", b"worker_lost"),
     (KeyError("secret"), b"The server had an error", b"internal_error")],
)  # fmt: skip
def test_an_error_in_a_stream_is_its_last_event(error: Exception, text: bytes, code: bytes) -> None:
    async def events() -> Any:
        yield b"second"
        raise error

    last = _stream(events, _never)[-1]
    assert last["body"].startswith(b'data: {"error":{"message":"' + text)
    assert code in last["body"]
    assert b"secret" not in last["body"]
    assert last["more_body"] is False


def test_a_stream_is_closed_when_the_client_leaves() -> None:
    closed = []

    async def events() -> Any:
        try:
            while True:
                await asyncio.sleep(0.001)
                yield b"x"
        finally:
            closed.append(True)

    sent = _stream(events, _gone)
    assert closed == [True]
    assert DONE not in [message.get("body") for message in sent]
