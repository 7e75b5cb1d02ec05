"""``/v1/chat/completions``: what comes in (messages checked one by one) and what goes out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from cotenant.api.schemas.sampling import MAX_LOGPROBS, Count, SamplingFields
from cotenant.core.errors import InvalidInputError
from cotenant.text.example_format import REASONING_FIELDS

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text")
_TEXT_FIELDS = ("name", "tool_call_id", *REASONING_FIELDS)
_MESSAGE_FIELDS = frozenset({"role", "content", "tool_calls", *_TEXT_FIELDS})
# ``type`` comes from lm-eval, ``weight`` from training files.
_IGNORED_MESSAGE_FIELDS = frozenset({"refusal", "annotations", "type", "weight"})


class ChatRequest(SamplingFields, kw_only=True):
    """The body of a chat completion. ``tools`` can be shown to the model, but no call is parsed from its answer."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] = 0
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tool_choice: Any = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def token_limit(self) -> int | None:
        """The most tokens that the client asked for; None: what is left of the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidInputError(
                "'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs", code="invalid_value"
            )
        if self.tools and self.tool_choice != "none":
            raise InvalidInputError(
                "'tools' is not supported by this server unless 'tool_choice' is 'none'.",
                param="tools",
                code="unsupported_parameter",
            )
        if self.tool_choice not in (None, "none", "auto"):
            raise InvalidInputError(
                "'tool_choice' is not supported by this server, other than 'none'.",
                param="tool_choice",
                code="unsupported_parameter",
            )


def checked_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation in the form that chat templates take: known roles, and content as one string (or None for an
    assistant message that only calls tools). Raises ``InvalidInputError`` naming the message and the field."""
    return [_checked_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _checked_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    fields = {name: value for name, value in message.items() if value is not None}
    role = fields.get("role")
    if role is None:
        raise _invalid(f"{where}.role", "it is missing", code="missing_required_parameter")
    if role not in ROLES:
        raise _invalid(f"{where}.role", f"{str(role)[:40]!r} is not one of {', '.join(ROLES)}")
    for name, value in fields.items():
        if name not in _MESSAGE_FIELDS and name not in _IGNORED_MESSAGE_FIELDS and value:
            raise _invalid(f"{where}.{name[:60]}", "this field is not supported", code="unsupported_parameter")
    checked: dict[str, Any] = {"role": role, "content": None}
    if "content" in fields:
        checked["content"] = _text_of(fields["content"], f"{where}.content")
    elif not (role == "assistant" and fields.get("tool_calls")):
        raise _invalid(f"{where}.content", "it is missing", code="missing_required_parameter")
    for name in _TEXT_FIELDS:
        if name in fields:
            checked[name] = _string(fields[name], f"{where}.{name}")
    if fields.get("tool_calls"):
        checked["tool_calls"] = _checked_tool_calls(fields["tool_calls"], f"{where}.tool_calls", role)
    return checked


def _text_of(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(where, "expected a string or an array of text parts")
    return "\n".join(_text_of_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _text_of_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise _invalid(where, "expected an object with 'type' and 'text'")
    kind = part.get("type")
    if kind not in _TEXT_PARTS:
        raise _invalid(
            where, f"parts of type {str(kind)[:40]!r} are not supported, only 'text'", code="unsupported_parameter"
        )
    return _string(part.get("text"), f"{where}.text")


def _checked_tool_calls(calls: Any, where: str, role: str) -> list[dict[str, Any]]:
    if role != "assistant":
        raise _invalid(where, "only assistant messages have tool calls")
    if not isinstance(calls, list):
        raise _invalid(where, "expected an array")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise _invalid(f"{where}[{index}].function", "expected an object")
        _string(function.get("name"), f"{where}[{index}].function.name")
    return calls


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _invalid(where, "expected a string")
    return value


def _invalid(where: str, reason: str, code: str = "invalid_value") -> InvalidInputError:
    return InvalidInputError(f"Invalid '{where}': {reason}.", param=where, code=code)


class PromptTokensDetails(msgspec.Struct):
    """``cached_tokens``: those of the prompt that the KV cache held when the request was admitted."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Token counts; a prompt that is answered ``n`` times counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(msgspec.Struct):
    """One generated token; ``bytes`` are its own, also where it is a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None = None


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class Delta(msgspec.Struct, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET  # with the finish_reason


class ChatChunk(msgspec.Struct):
    """One event of a stream. ``usage`` is there only if the client asked for it, and null before the last event."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
