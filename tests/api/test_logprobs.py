"""Log-probabilities in both shapes."""

from __future__ import annotations

import asyncio
import json
import math
import unicodedata
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from cotenant.api.logprobs import (
    LOWEST_LOGPROB,
    TokenTexts,
    chat_logprobs,
    chat_logprobs_parts,
    completion_logprobs,
    completion_logprobs_parts,
)
from cotenant.api.responses import JsonParts
from cotenant.api.routes.completions import prompt_offsets
from cotenant.api.schemas.chat import ChatLogprobs
from cotenant.api.schemas.completion import CompletionLogprobs
from cotenant.api.turns import Turns
from cotenant.core.request import TokenLogprobs
from cotenant.text.byte_tokenizer import ByteTokenizer
from cotenant.text.tokenizer import load_tokenizer
from text.samples import byte_level_folder, sentencepiece_folder

TEXTS = TokenTexts(ByteTokenizer(300))
FIRST_OF_TWO = "é".encode()[0]


def test_chat_shape() -> None:
    entry = TokenLogprobs(ord("a"), -0.5, 1, ((ord("a"), -0.5), (FIRST_OF_TWO, -math.inf)))
    body = msgspec.to_builtins(chat_logprobs([entry], TEXTS))
    assert body["content"] == [
        {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [
                {"token": "a", "logprob": -0.5, "bytes": [97]},
                {"token": "\ufffd", "logprob": LOWEST_LOGPROB, "bytes": [FIRST_OF_TWO]},
            ],
        }
    ]


def test_completion_shape_begins_with_nothing_known() -> None:
    entries = [None, TokenLogprobs(ord("b"), -2.0, 2, ((ord("c"), -1.0),))]
    body = completion_logprobs([ord("a"), ord("b")], entries, [0, 1], TEXTS)
    assert body.tokens == ["a", "b"]
    assert body.token_logprobs == [None, -2.0]
    assert body.top_logprobs == [None, {"c": -1.0, "b": -2.0}]
    assert body.text_offset == [0, 1]


def test_tokens_with_the_same_text_do_not_hide_the_likeliest() -> None:
    first, second = "é".encode()  # each alone reads as U+FFFD
    entry = TokenLogprobs(second, -3.0, 2, ((first, -0.1),))
    body = completion_logprobs([second], [entry], [0], TEXTS)
    assert body.top_logprobs == [{"\ufffd": -0.1}]
    assert body.token_logprobs == [-3.0]  # so that lm-eval sees that the token was not the greedy one


def many(num_tokens: int, num_alternatives: int) -> list[TokenLogprobs]:
    top = tuple((other, -2.0) for other in range(num_alternatives))
    return [TokenLogprobs(ord("a") + number % 26, -1.0, 1, top) for number in range(num_tokens)]


def between_turns(work: Callable[[Turns], Coroutine[Any, Any, list[bytes]]], num_at_once: int = 1) -> tuple[bytes, int]:
    """What comes of ``work``, done so many times at once, and how often others could run meanwhile."""

    async def run() -> tuple[bytes, int]:
        num_runs = 0

        async def others() -> None:
            nonlocal num_runs
            while True:
                await asyncio.sleep(0)
                num_runs += 1

        running, turns = asyncio.create_task(others()), Turns()
        done = await asyncio.gather(*(work(turns) for _ in range(num_at_once)))
        running.cancel()
        assert all(parts == done[0] for parts in done)
        return b"".join(done[0]), num_runs

    return uvloop.run(run())


@pytest.mark.parametrize(("num_tokens", "num_alternatives"), [(0, 0), (1, 0), (3000, 0), (1, 20), (1000, 20)])
def test_what_is_made_in_turns_is_the_same(num_tokens: int, num_alternatives: int) -> None:
    entries = many(num_tokens, num_alternatives)
    made, num_runs = between_turns(lambda turns: chat_logprobs_parts(entries, TEXTS, turns))
    assert msgspec.json.decode(made, type=ChatLogprobs) == chat_logprobs(entries, TEXTS)
    assert num_runs >= num_tokens * (1 + num_alternatives) // 1024

    # An echoed prompt's first token has no probability.
    token_ids, offsets = [7, *(entry.token_id for entry in entries)], list(range(num_tokens + 1))
    expected = completion_logprobs(token_ids, [None, *entries], offsets, TEXTS)
    made, num_runs = between_turns(
        lambda turns: completion_logprobs_parts(token_ids, [None, *entries], offsets, TEXTS, turns)
    )
    assert msgspec.json.decode(made, type=CompletionLogprobs) == expected
    assert num_runs >= num_tokens * (1 + num_alternatives) // 1024


def test_many_long_answers_at_once_hold_others_up_no_more_than_one() -> None:
    entries = many(500, 20)
    _, num_runs = between_turns(lambda turns: chat_logprobs_parts(entries, TEXTS, turns), num_at_once=20)
    assert num_runs >= 20 * 500 * 21 // 1024


def test_a_long_answer_is_sent_in_pieces() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is to be received")

    for parts in ([b"{}"], [], [b"1234567890" * 10_000] * 30):
        sent.clear()
        asyncio.run(JsonParts(parts)({"type": "http"}, receive, send))
        start, *bodies = sent
        headers = dict(start["headers"])
        assert (start["status"], headers[b"content-type"]) == (200, b"application/json")
        assert int(headers[b"content-length"]) == sum(map(len, parts))
        assert b"".join(body["body"] for body in bodies) == b"".join(parts)
        assert [body["more_body"] for body in bodies] == [True] * (len(bodies) - 1) + [False]
        assert max(len(body["body"]) for body in bodies) <= 400_000


@pytest.mark.parametrize("prompt", ["the river", "é</s> the 🙂 . river", "🙂</s> river</s>\n  the", "  the river  "])
def test_offsets_are_places_in_the_prompt_as_it_was_sent(tmp_path: Path, prompt: str) -> None:
    assert_offsets_fit(sentencepiece_folder(tmp_path), prompt)


def test_offsets_are_places_in_a_prompt_that_is_normalised(tmp_path: Path) -> None:
    file = byte_level_folder(tmp_path) / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": {"type": "NFC"}}))
    assert_offsets_fit(tmp_path, "cafe\u0301 cafe\u0301 the river")


def assert_offsets_fit(folder: Path, prompt: str) -> None:
    tokenizer = load_tokenizer(folder, 800)
    token_ids = tokenizer.encode(prompt)
    offsets = prompt_offsets(tokenizer, prompt, token_ids)
    assert list(offsets) == sorted(offsets)
    for token_id, offset in list(zip(token_ids, offsets, strict=True))[1:]:  # the first one starts a text
        text = tokenizer.token_text(token_id).strip().strip("\ufffd")
        assert unicodedata.normalize("NFC", prompt[offset:]).lstrip().startswith(text)
