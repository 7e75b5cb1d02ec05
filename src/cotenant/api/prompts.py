"""From text or messages to the token ids of a prompt that fits the context."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from cotenant.api.schemas.chat import checked_messages
from cotenant.core.errors import InvalidInputError, OverloadedError
from cotenant.text.chat import ChatTemplate
from cotenant.text.tokenizer import Tokenizer
from cotenant.wire.messages import Ready

if TYPE_CHECKING:
    from cotenant.api.state import AppState

T = TypeVar("T")

# Shorter texts are tokenised faster than a thread takes over; longer ones would hold up other clients' tokens.
_INLINE_CHARACTERS = 4096
# What a message, or a part of one, costs besides its text, as a number of characters that cost as much.
_MESSAGE_CHARACTERS = 64
# Names that the rendering itself uses.
_RESERVED_VARIABLES = frozenset({"self", "messages", "tools", "add_generation_prompt", "generation_marks"})


def require_ready(state: AppState) -> Ready:
    """What the worker said when it was last ready: while it is restarted, requests wait for it.

    Raises ``OverloadedError`` before the first time, when it is given up, and when there is no room.
    """
    ready = state.worker.last_ready if state.worker.failed is None else None
    if ready is None:
        raise OverloadedError("The model is being loaded; try again in a moment.", code="model_loading")
    if state.worker.num_live >= state.config.batch.max_queue:
        raise OverloadedError(
            f"The server already has {state.worker.num_live} requests, which is its limit; try again later.",
            code="overloaded",
        )
    return ready


def check_num_choices(state: AppState, n: int, num_prompts: int = 1) -> None:
    """Raise ``InvalidInputError`` if one request asks for more sequences than the server ever takes at once."""
    limit = state.config.batch.max_queue
    if n * num_prompts > limit:
        param = "prompt" if n == 1 else "n"
        raise InvalidInputError(
            f"Invalid '{param}': this request needs {n * num_prompts} sequences, {n} for each prompt, and at most "
            f"{limit} are taken at once, which is the server's --max-queue. Send it in several requests.",
            param=param,
            code="invalid_value",
        )


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template is given. ``variables`` are the client's ``chat_template_kwargs``."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    add_generation_prompt: bool = True
    variables: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.variables:
            if name in _RESERVED_VARIABLES:
                raise InvalidInputError(
                    f"Invalid 'chat_template_kwargs': {name!r} is not for clients to set.",
                    param="chat_template_kwargs",
                    code="invalid_value",
                )

    @property
    def num_characters(self) -> int:
        """The characters that the messages' contents hold; the prompt has more."""
        return sum(len(message.get("content") or "") for message in self.messages)

    @property
    def is_small(self) -> bool:
        """Whether it is a short talk of nothing but texts, which is rendered in no time."""
        if self.tools or self.variables or len(self.messages) * _MESSAGE_CHARACTERS > _INLINE_CHARACTERS:
            return False
        values = [value or "" for message in self.messages for value in message.values()]
        only_texts = all(isinstance(value, str) for value in values)
        return only_texts and sum(len(value) for value in values) <= _INLINE_CHARACTERS


class PromptEncoder:
    """Turns text and conversations into token ids, and refuses one that is far too long before much is done with it."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._longest_token_characters: int | None = None

    async def encode(self, text: str, *, add_special_tokens: bool, max_model_len: int, param: str) -> list[int]:
        """The ids of ``text``. Raises ``InvalidInputError`` if no tokenisation of it fits ``max_model_len`` tokens."""
        await self._check_length(len(text), max_model_len, param)
        return await run_apart(len(text), lambda: self._tokenizer.encode(text, add_special_tokens))

    async def check_messages(self, messages: list[dict[str, Any]], *, max_model_len: int) -> list[dict[str, Any]]:
        """``checked_messages``, in a thread if there is much of them. Raises ``InvalidInputError``, also if the line
        breaks alone that join parts of content are far too long: before anything is done for each part."""
        num_messages = len(messages)
        num_parts, num_calls = await run_apart(
            num_messages * _MESSAGE_CHARACTERS,
            lambda: (_num_listed(messages, "content"), _num_listed(messages, "tool_calls")),
        )
        await self._check_length(num_parts - num_messages, max_model_len, "messages")
        num_pieces = num_messages + num_parts + num_calls
        return await run_apart(num_pieces * _MESSAGE_CHARACTERS, lambda: checked_messages(messages))

    async def encode_chat(
        self, conversation: Conversation, *, max_model_len: int, add_special_tokens: bool = False
    ) -> list[int]:
        """The ids of ``conversation`` as the chat template writes it. Raises ``InvalidInputError`` if it is far too
        long, or if the template refuses it."""
        await self._check_length(conversation.num_characters, max_model_len, "messages")
        if conversation.is_small:
            text = self._render(conversation)
        else:
            text = await asyncio.to_thread(self._render, conversation)
        return await self.encode(
            text, add_special_tokens=add_special_tokens, max_model_len=max_model_len, param="messages"
        )

    def _render(self, conversation: Conversation) -> str:
        return self._chat_template.render(
            conversation.messages,
            conversation.tools or None,
            conversation.add_generation_prompt,
            **conversation.variables,
        )

    async def _check_length(self, num_characters: int, max_model_len: int, param: str) -> None:
        if num_characters <= max_model_len:
            return
        if self._longest_token_characters is None:
            self._longest_token_characters = await asyncio.to_thread(_longest_token_characters, self._tokenizer)
        num_tokens = -(-num_characters // self._longest_token_characters)
        if num_tokens > max_model_len:
            raise _too_long(f"at least {num_tokens}", max_model_len, param)


def _longest_token_characters(tokenizer: Tokenizer) -> int:
    return max(1, max(len(tokenizer.token_text(token_id)) for token_id in range(tokenizer.vocab_size)))


async def run_apart(num_characters: int, work: Callable[[], T]) -> T:
    """``work`` on so many characters, in a thread if it would hold up other clients."""
    return work() if num_characters <= _INLINE_CHARACTERS else await asyncio.to_thread(work)


def _num_listed(messages: list[dict[str, Any]], field: str) -> int:
    """How many items the messages hold together in ``field``, where that is a list."""
    values = (message.get(field) for message in messages)
    return sum(len(value) for value in values if isinstance(value, list))


def check_num_tokens(num_prompt: int, max_model_len: int, param: str) -> None:
    """Raise ``InvalidInputError``, as ``token_budget`` does, for a prompt that no request has room for."""
    if num_prompt > max_model_len:
        raise _too_long(str(num_prompt), max_model_len, param)


def token_budget(num_prompt: int, requested: int | None, default: int | None, max_model_len: int, param: str) -> int:
    """How many tokens may be generated: what was requested, or ``default`` (None: all that is left).

    Raises ``InvalidInputError`` in OpenAI's words if the prompt, or the prompt and what was requested, exceed the
    context of ``max_model_len`` tokens.
    """
    left = max_model_len - num_prompt
    if left < (0 if requested == 0 else 1):
        raise _too_long(str(num_prompt), max_model_len, param)
    if requested is None:
        return left if default is None else min(default, left)
    if requested > left:
        raise InvalidInputError(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{num_prompt + requested} tokens ({num_prompt} in the {param}, {requested} in the completion). "
            f"Please reduce the length of the {param} or completion.",
            code="context_length_exceeded",
            param=param,
        )
    return requested


def _too_long(num_tokens: str, max_model_len: int, param: str) -> InvalidInputError:
    return InvalidInputError(
        f"This model's maximum context length is {max_model_len} tokens. However, your {param} resulted in "
        f"{num_tokens} tokens. Please reduce the length of the {param}.",
        code="context_length_exceeded",
        param=param,
    )
