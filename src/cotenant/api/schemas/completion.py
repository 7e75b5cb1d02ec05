"""``/v1/completions``: what comes in and what goes out."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal, cast

import msgspec
from msgspec import UNSET, Meta, UnsetType

from cotenant.api.schemas.chat import Usage
from cotenant.api.schemas.sampling import MAX_LOGPROBS, MAX_TOKEN_IDS, SamplingFields
from cotenant.core.errors import InvalidInputError

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 2048
_INT32 = 2**31 - 1

Prompt = str | list[int]
TokenIds = Annotated[list[int], Meta(max_length=MAX_TOKEN_IDS)]


class CompletionRequest(SamplingFields, kw_only=True, dict=True):
    """The body of a completion. ``prompt`` is a string, a list of token ids, or a list of either. It has a ``__dict__``
    for what is cached."""

    prompt: str | Annotated[list[str | int | TokenIds], Meta(min_length=1, max_length=MAX_TOKEN_IDS)]
    max_tokens: Annotated[int, Meta(ge=0, le=_INT32)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=0, le=_INT32)] | None = None
    echo: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool = True

    @property
    def token_limit(self) -> int | None:
        """The most tokens that the client asked for; None: it named no limit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The prompts, one or many. Raises ``InvalidInputError`` for a list of mixed kinds."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = set(map(type, self.prompt))
        if kinds == {int}:
            return [cast(list[int], self.prompt)]
        if int in kinds:
            raise InvalidInputError(
                "Invalid 'prompt': a list must hold only token ids, or only strings and lists of token ids.",
                param="prompt",
                code="invalid_value",
            )
        return cast(list[Prompt], self.prompt)

    def check(self) -> None:
        super().check()
        if len(self.prompts) > MAX_PROMPTS:
            raise InvalidInputError(
                f"Invalid 'prompt': {len(self.prompts)} prompts in one request, at most {MAX_PROMPTS} are taken.",
                param="prompt",
                code="invalid_value",
            )


class CompletionLogprobs(msgspec.Struct):
    """One entry per token in each list; None for a prompt's first token, which nothing precedes.

    ``text_offset`` counts characters from the start of the choice's whole text, also in a stream.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET


class Completion(msgspec.Struct):
    """A whole answer, or one event of a stream; there ``usage`` is as in ``ChatChunk``."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"
