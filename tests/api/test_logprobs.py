"""Log-probabilities in both shapes."""

from __future__ import annotations

import math

import msgspec

from cotenant.api.logprobs import LOWEST_LOGPROB, TokenTexts, chat_logprobs, completion_logprobs, joined
from cotenant.core.request import TokenLogprobs
from cotenant.text.byte_tokenizer import ByteTokenizer

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
