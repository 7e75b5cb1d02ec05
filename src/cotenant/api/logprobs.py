"""Log-probabilities in the shapes that clients know: OpenAI's for chat, the older one for text completions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from cotenant.api.responses import around, json_items, listed
from cotenant.api.schemas.chat import ChatLogprob, ChatLogprobs, TopLogprob
from cotenant.api.schemas.completion import CompletionLogprobs
from cotenant.api.turns import Turns
from cotenant.core.request import TokenLogprobs, stretches
from cotenant.text.tokenizer import Tokenizer

# What OpenAI sends for a token that can not come; JSON has no infinity.
LOWEST_LOGPROB = -9999.0
# Probabilities, of tokens and their alternatives, that are made and encoded in one turn.
_TURN_VALUES = 1024


class TokenTexts:
    """Each token's text and bytes, looked up in the tokenizer once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def text(self, token_id: int) -> str:
        return self._lookup(token_id)[0]

    def bytes(self, token_id: int) -> list[int]:
        return self._lookup(token_id)[1]

    def _lookup(self, token_id: int) -> tuple[str, list[int]]:
        known = self._known.get(token_id)
        if known is None:
            known = self._tokenizer.token_text(token_id), list(self._tokenizer.token_bytes(token_id))
            self._known[token_id] = known
        return known


def chat_logprobs(entries: Sequence[TokenLogprobs], texts: TokenTexts) -> ChatLogprobs:
    """Generated tokens in the chat shape."""
    return ChatLogprobs(
        [
            ChatLogprob(
                texts.text(entry.token_id),
                _finite(entry.logprob),
                texts.bytes(entry.token_id),
                [TopLogprob(texts.text(other), _finite(value), texts.bytes(other)) for other, value in entry.top],
            )
            for entry in entries
        ]
    )


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    offsets: Sequence[int],
    texts: TokenTexts,
) -> CompletionLogprobs:
    """Tokens in the older shape: one entry each, None where a prompt's first token has no probability."""
    return CompletionLogprobs(
        [texts.text(token_id) for token_id in token_ids],
        [None if entry is None else _finite(entry.logprob) for entry in entries],
        [None if entry is None else _top_by_text(entry, texts) for entry in entries],
        list(offsets),
    )


async def chat_logprobs_parts(entries: Sequence[TokenLogprobs], texts: TokenTexts, turns: Turns) -> list[bytes]:
    """``chat_logprobs`` as JSON, for any number of tokens."""

    def items(stretch: slice) -> bytes:
        return json_items(chat_logprobs(entries[stretch], texts).content)

    parts = [[await turns.take(partial(items, stretch))] for stretch in stretches(entries, _TURN_VALUES)]
    before, after = around(lambda content: ChatLogprobs([content]))
    return [before, *listed(parts), after]


async def completion_logprobs_parts(
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    offsets: Sequence[int],
    texts: TokenTexts,
    turns: Turns,
) -> list[bytes]:
    """``completion_logprobs`` as JSON, for any number of tokens."""

    def items(stretch: slice) -> list[bytes]:
        part = completion_logprobs(token_ids[stretch], entries[stretch], offsets[stretch], texts)
        return [json_items(getattr(part, name)) for name in names]

    names = CompletionLogprobs.__struct_fields__
    made = [await turns.take(partial(items, stretch)) for stretch in stretches(entries, _TURN_VALUES)]
    parts: list[bytes] = []
    for number, name in enumerate(names):
        parts += [b"," if parts else b"{", json_items([name]), b":["]
        parts += listed([[stretch[number]] for stretch in made])
        parts.append(b"]")
    return [*parts, b"}"]


def _top_by_text(entry: TokenLogprobs, texts: TokenTexts) -> dict[str, float]:
    """Alternatives by their text, the token itself among them. Of tokens with the same text the likeliest counts."""
    top: dict[str, float] = {}
    for token_id, value in (*entry.top, (entry.token_id, entry.logprob)):
        text = texts.text(token_id)
        top[text] = max(top.get(text, LOWEST_LOGPROB), _finite(value))
    return top


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
