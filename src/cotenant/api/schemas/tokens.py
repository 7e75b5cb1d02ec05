"""``/tokenize`` and ``/detokenize``, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from cotenant.api.schemas.sampling import MAX_TOKEN_IDS, TokenId
from cotenant.core.errors import InvalidInputError

MAX_TEXT_CHARACTERS = 4 * 1024 * 1024


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Either a ``prompt`` or ``messages``. A chat template writes the special tokens itself, so ``add_special_tokens``
    is on by default for a prompt only."""

    model: str | None = None
    prompt: Annotated[str, Meta(max_length=MAX_TEXT_CHARACTERS)] | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    def check(self) -> None:
        if self.prompt is None and self.messages is None:
            raise InvalidInputError("Send 'prompt' or 'messages'.", param="prompt", code="missing_required_parameter")
        if self.prompt is not None and self.messages is not None:
            raise InvalidInputError("Send 'prompt' or 'messages', not both.", param="messages", code="invalid_value")


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKEN_IDS)]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct):
    prompt: str
