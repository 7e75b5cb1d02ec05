"""Prompts that fit the context, and those that don't."""

from __future__ import annotations

import asyncio

import pytest

from cotenant.api.auth import check_key
from cotenant.api.errors import InvalidApiKeyError
from cotenant.api.prompts import Conversation, PromptEncoder, token_budget
from cotenant.core.errors import InvalidInputError
from cotenant.text.byte_tokenizer import ByteTokenizer
from cotenant.text.chat import load_chat_template

ENCODER = PromptEncoder(ByteTokenizer(300), load_chat_template(None, None))


@pytest.mark.parametrize(
    ("num_prompt", "requested", "default", "budget"),
    [(10, None, None, 90), (10, None, 16, 16), (95, None, 16, 5), (10, 90, None, 90), (100, 0, 16, 0), (10, 0, 16, 0)],
)
def test_what_is_left_of_the_context(num_prompt: int, requested: int | None, default: int | None, budget: int) -> None:
    assert token_budget(num_prompt, requested, default, 100, "prompt") == budget


@pytest.mark.parametrize(
    ("num_prompt", "requested", "numbers"), [(100, None, "100"), (101, 0, "101"), (10, 91, "101 tokens (10 in")]
)
def test_too_much_is_refused_with_the_numbers(num_prompt: int, requested: int | None, numbers: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        token_budget(num_prompt, requested, None, 100, "messages")
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"
    assert "maximum context length is 100 tokens" in caught.value.message
    assert numbers in caught.value.message


def test_text_far_beyond_the_context_is_not_even_tokenised() -> None:
    with pytest.raises(InvalidInputError, match="at least") as caught:
        asyncio.run(ENCODER.encode("x" * 10_000_000, add_special_tokens=True, max_model_len=100, param="prompt"))
    assert caught.value.code == "context_length_exceeded"


def test_text_within_reach_is_tokenised_whatever_its_length() -> None:
    for length in (10, 10_000):  # the longer one goes to a thread
        ids = asyncio.run(ENCODER.encode("x" * length, add_special_tokens=False, max_model_len=20_000, param="prompt"))
        assert ids == [ord("x")] * length


@pytest.mark.parametrize("name", ["messages", "tools", "self", "add_generation_prompt"])
def test_template_variables_cannot_replace_the_conversation(name: str) -> None:
    with pytest.raises(InvalidInputError, match="chat_template_kwargs"):
        Conversation([{"role": "user", "content": "x"}], variables={name: []})


@pytest.mark.parametrize("header", ["Bearer secret", "bearer  secret ", "BEARER secret"])
def test_the_right_key_passes(header: str) -> None:
    check_key(header, "secret")


@pytest.mark.parametrize(
    "header", [None, "", "secret", "Bearer", "Bearer ", "Bearer secre", "Bearer secretx", "Basic secret"]
)
def test_any_other_key_does_not(header: str | None) -> None:
    with pytest.raises(InvalidApiKeyError) as caught:
        check_key(header, "secret")
    assert caught.value.code == "invalid_api_key"
    assert "secret" not in caught.value.message


def test_a_key_beyond_ascii_is_compared_by_its_bytes() -> None:
    on_the_wire = "schlüssel".encode().decode("latin-1")  # as the server hands headers over
    check_key(f"Bearer {on_the_wire}", "schlüssel")
