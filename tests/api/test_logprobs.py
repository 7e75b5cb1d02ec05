"""Log-probabilities in both shapes."""

from __future__ import annotations

import json
import math
import unicodedata
from pathlib import Path

import msgspec
import pytest

from cotenant.api.logprobs import LOWEST_LOGPROB, TokenTexts, chat_logprobs, completion_logprobs, joined
from cotenant.api.routes.completions import prompt_offsets
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


def test_stretches_are_joined_in_order() -> None:
    parts = [completion_logprobs([ord(c)], [TokenLogprobs(ord(c), -1.0, 1)], [i], TEXTS) for i, c in enumerate("ab")]
    assert joined(parts) == completion_logprobs(
        [ord("a"), ord("b")], [TokenLogprobs(ord("a"), -1.0, 1), TokenLogprobs(ord("b"), -1.0, 1)], [0, 1], TEXTS
    )


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
