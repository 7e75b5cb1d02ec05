"""``/v1/completions``: what comes in and what goes out."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from cotenant.api.schemas.chat import Usage
from cotenant.api.schemas.sampling import MAX_LOGPROBS, SamplingFields
from cotenant.core.errors import InvalidInputError

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 2048
# Far more tokens than any context has, and few enough that looking at each of them holds nobody up.
_MAX_ITEMS = 1 << 20
_INT32 = 2**31 - 1

Prompt = str | list[int]
TokenIds = Annotated[list[int], Meta(max_length=_MAX_ITEMS)]


class CompletionRequest(SamplingFields, kw_only=True):
    """The body of a completion. ``prompt`` is a string, a list of token ids, or a list of either."""

    prompt: str | Annotated[list[str | int | TokenIds], Meta(min_length=1, max_length=_MAX_ITEMS)]
    max_tokens: Annotated[int, Meta(ge=0, le=_INT32)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=0, le=_INT32)] | None = None
    echo: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    add_special_tokens: bool = True

    @property
    def token_limit(self) -> int | None:
        """The most tokens that the client asked for; None: it named no limit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts, one or many. Raises ``InvalidInputError`` for a list of mixed kinds."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(item, int) for item in self.prompt):
            return [[item for item in self.prompt if isinstance(item, int)]]
        prompts: list[Prompt] = [item for item in self.prompt if not isinstance(item, int)]
        if len(prompts) != len(self.prompt):
            raise InvalidInputError(
                "Invalid 'prompt': a list must hold only token ids, or only strings and lists of token ids.",
                param="prompt",
                code="invalid_value",
            )
        return prompts

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != self.n:
            raise InvalidInputError(
                "'best_of' is not supported by this server, unless it equals 'n'.",
                param="best_of",
                code="unsupported_parameter",
            )
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
