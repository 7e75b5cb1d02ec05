"""From a request body to a checked struct. Every complaint names the field that it is about.

A null counts as a field that was not sent. Fields that cannot change the answer are ignored; one that could and that we
don't support is refused by its name, unless its value asks for nothing.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

import msgspec
from fastapi import Request

from cotenant.api.schemas.structure import SMALL_BODY_BYTES, check_structure
from cotenant.api.turns import nothing_is_garbage
from cotenant.core.errors import InvalidInputError
from cotenant.text.unicode import unpaired_surrogate

T = TypeVar("T", bound=msgspec.Struct)
_MOST_SHOWN = 40  # characters of a key

IGNORED_FIELDS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "parallel_tool_calls", "prompt_cache_key",
        "prompt_cache_retention", "prompt_cache_options", "request_id", "session_id", "stream_interval",
        "return_token_offsets", "return_mm_kwargs",
    }
)  # fmt: skip

# Known to OpenAI's or vLLM's API and not to us. Harmless only with the values listed here, or an empty one, but for
# those whose empty values ask for something.
UNSUPPORTED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": (),
    "chat_template": (),
    "continue_final_message": (),
    "detokenize": (True,),
    "documents": (),
    "early_stopping": (),
    "ec_transfer_params": (),
    "echo": (),
    "function_call": ("none", "auto"),
    "functions": (),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logits_processors": (),
    "logprob_token_ids": (),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "return_prompt_text": (),
    "return_token_ids": (),
    "return_tokens_as_token_ids": (),
    "routed_experts_prompt_start": (),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "structured_outputs": (),
    "suffix": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "truncation_side": ("left", "right"),
    "use_beam_search": (),
    "verbosity": ("medium",),
    "vllm_xargs": (),
    "watermarking": (),
    "web_search_options": (),
}
_EMPTY_ASKS = frozenset(
    {
        "allowed_token_ids", "detokenize", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
        "include_reasoning", "prediction", "prompt_logprobs", "response_format", "spaces_between_special_tokens",
        "structural_tag", "structured_outputs", "thinking_token_budget", "web_search_options",
    }
)  # fmt: skip

_TYPE_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "object": "an object",
    "array": "an array",
    "null": "null",
}
_LENGTH_WORDS = (("a string of length", "a string with a length"), ("an array of length", "an array with a length"))


async def read_object(request: Request) -> dict[str, Any]:
    """The request's body as a JSON object, without its null fields. Raises ``InvalidInputError`` for what is no such
    thing, and for one with too many values, before they are made."""
    body = await request.body()
    try:
        if len(body) > SMALL_BODY_BYTES:
            await asyncio.to_thread(check_structure, body)
        with nothing_is_garbage():
            decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = _half_pair(str(error), body) or str(error)
        raise InvalidInputError(
            f"The request body could not be parsed as JSON: {reason}.", code="invalid_json"
        ) from None
    if not isinstance(decoded, dict):
        raise InvalidInputError("The request body must be a JSON object.", code="invalid_json")
    return {name: value for name, value in decoded.items() if value is not None}


def _half_pair(complaint: str, body: bytes) -> str | None:
    """What msgspec complains of where it met an escape for half of a UTF-16 pair; None if it met something else. Near
    the end of a body it says only that there is no room for the other half."""
    place = re.search(r"surrogate pair \(byte (\d+)\)", complaint)
    if place:
        end = int(place[1])
        halves = re.findall(rb"\\u([dD][89a-fA-F][0-9a-fA-F]{2})", body[max(0, end - 12) : end])
    elif "truncated" in complaint:
        halves = re.findall(rb"\\u([dD][89abAB][0-9a-fA-F]{2})(?!\\u|\\?\Z)", body[-11:])
    else:
        return None
    code_points = [int(half, 16) for half in halves]
    # One that begins a pair lacks what follows; before one that would end it there may be the end of another.
    alone = [code_point for code_point in code_points if code_point < 0xDC00][:1] or code_points[-1:]
    return f"it holds {unpaired_surrogate(alone[0])}" if alone else None


def parse(fields: dict[str, Any], kind: type[T]) -> T:
    """Check ``fields`` and build a ``kind`` (whose class forbids unknown fields) from them."""
    known = frozenset(kind.__struct_fields__)
    for name, value in fields.items():
        if name in known or name in IGNORED_FIELDS:
            continue
        if name not in UNSUPPORTED_FIELDS:
            raise InvalidInputError(
                f"Unrecognized request argument supplied: {name[:100]}.", code="unknown_parameter", param=name[:100]
            )
        if not _asks_for_nothing(name, value):
            raise InvalidInputError(
                f"'{name}' is not supported by this server.", code="unsupported_parameter", param=name
            )
    return convert({name: value for name, value in fields.items() if name in known}, kind)


def convert(fields: Any, kind: type[T]) -> T:
    """``msgspec.convert`` with complaints in the API's words."""
    try:
        with nothing_is_garbage():
            return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        complaint = str(error)
        raise _described(complaint, _wrong_key(complaint, fields, kind)) from None


def _wrong_key(complaint: str, fields: Any, kind: type) -> str | None:
    """The key of the value that msgspec complains of, where all that it says is that a field's object has one."""
    place = re.search(r" - at `\$\.(\w+)\[\.\.\.\]`$", complaint)
    values = fields.get(place[1]) if place and isinstance(fields, dict) else None
    if not place or not isinstance(values, dict):
        return None
    of_field = get_type_hints(kind, include_extras=True)[place[1]]
    for key, value in values.items():
        try:
            msgspec.convert({key: value}, of_field)
        except msgspec.ValidationError:
            return str(key)
    return None


def _asks_for_nothing(name: str, value: Any) -> bool:
    harmless = UNSUPPORTED_FIELDS[name]
    return (not value and name not in _EMPTY_ASKS) or value in harmless


def _described(complaint: str, key: str | None) -> InvalidInputError:
    """A complaint of msgspec's, 'Expected `int` >= 0 - at `$.n`', becomes "Invalid 'n': expected an integer >= 0.".
    ``key``: of a field's object, the one whose value is wrong."""
    missing = re.search(r"missing required field `(\w+)`", complaint)
    unknown = re.search(r"unknown field `(.*?)`", complaint)
    what, _, place = complaint.partition(" - at ")
    path = place.strip("`").removeprefix("$").removeprefix(".").removesuffix("[...]")
    if missing or unknown:
        name = ".".join(part for part in (path, (missing or unknown)[1]) if part)[:200]  # type: ignore[index]
        if missing:
            return InvalidInputError(
                f"Missing required parameter: '{name}'.", code="missing_required_parameter", param=name
            )
        return InvalidInputError(
            f"Unrecognized request argument supplied: {name}.", code="unknown_parameter", param=name
        )
    reason = re.sub(r"`([^`]*)`", lambda match: _type_words(match[1]), what)
    for old, new in _LENGTH_WORDS:
        reason = reason.replace(old, new)
    reason = reason[:1].lower() + reason[1:]
    if key is not None:
        reason = f"for the key {key[:_MOST_SHOWN]!r} {reason}"
    return InvalidInputError(f"Invalid '{path}': {reason}.", code="invalid_value", param=path or None)


def _type_words(types: str) -> str:
    names = [name for name in types.split(" | ") if name != "null"] or ["null"]
    return " or ".join(_TYPE_WORDS.get(name, name) for name in names)
