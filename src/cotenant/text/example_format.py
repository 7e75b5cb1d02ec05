"""The shape of one training example in OpenAI's chat format, and the words for what is wrong with it.

A field that is null counts as one that is not there, and so does an empty list of tool calls: clients that write
what an API has answered write all fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cotenant.text.strict_json import parse_json

ROLES = ("system", "developer", "user", "assistant", "tool")
# The names under which a message may carry its reasoning; the first that is given counts.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

_OTHER_FORMATS = (
    (("input", "preferred_output"), "it is a preference example, which is for method.type 'dpo'"),
    (("chosen", "rejected"), "it is a preference example, which is for method.type 'dpo'"),
    (("prompt", "completion"), "it is in the old prompt/completion format; write it as 'messages'"),
    (("conversations",), "it is in the ShareGPT format ('conversations'); write it as 'messages'"),
)


def example_problems(example: dict[str, Any]) -> list[str]:
    """What is wrong with an example, in the words that follow 'Line 57'; empty if nothing is."""
    messages = example.get("messages")
    if messages is None:
        known = [f": {hint}" for keys, hint in _OTHER_FORMATS if all(example.get(key) is not None for key in keys)]
        return known or [" has no 'messages'"]
    if not isinstance(messages, list) or not messages:
        return [": 'messages' must be a list with at least one message"]
    problems = [f": {problem}" for problem in tools_problems(example)]
    for number, message in enumerate(messages, start=1):
        if problem := message_problem(message):
            role = message.get("role") if isinstance(message, dict) else None
            who = f" ({role})" if role in ROLES else ""
            problems.append(f", message {number}{who}: {problem}")
    if not problems:
        problems = [f": {problem}" for problem in _training_problems(messages)]
    return problems


def tools_problems(example: Mapping[str, Any]) -> list[str]:
    """What is wrong with the fields beside an example's messages."""
    problems = []
    if example.get("functions") is not None:
        problems.append("'functions' is the old form; use 'tools'")
    tools = example.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(_is_function(tool) for tool in tools)):
        problems.append('\'tools\' must be a list of {"type": "function", "function": {"name": …}}')
    if not isinstance(example.get("parallel_tool_calls"), bool | None):
        problems.append("'parallel_tool_calls' must be true or false")
    return problems


def _training_problems(messages: list[dict[str, Any]]) -> list[str]:
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        return ["nothing to train on: it has no message of the assistant"]
    if all(message.get("weight") == 0 for message in answers):
        return ["nothing to train on: every message of the assistant has weight 0"]
    return []


def without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that count as there."""
    return {key: value for key, value in fields.items() if value is not None}


def message_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a message."""
    fields = without_nulls(message)
    if fields.get("tool_calls") == []:
        del fields["tool_calls"]
    return fields


def message_problem(message: Any) -> str | None:
    """What is wrong with a message, in words that follow 'message 2: '; None if nothing is."""
    if not isinstance(message, dict):
        return "a message must be a dictionary"
    message = message_fields(message)
    role = message.get("role")
    if role is None:
        return "it has no 'role'"
    if role == "function" or "function_call" in message:
        return "'function_call' and the role 'function' are the old form; use 'tool_calls' and the role 'tool'"
    if role not in ROLES:
        return f"unknown role {_shown(role)}; it must be one of {', '.join(ROLES)}"
    for key in ("name", "tool_call_id"):
        if not isinstance(message.get(key, ""), str):
            return f"'{key}' must be a string"
    for key in REASONING_FIELDS:
        if not isinstance(message.get(key, ""), str):
            return f"'{key}' must be a string, not {_shown(message[key])}"
    return _assistant_problem(message) if role == "assistant" else _listener_problem(message)


def _listener_problem(message: dict[str, Any]) -> str | None:
    if "weight" in message:
        return "'weight' belongs to messages of the assistant only"
    if "tool_calls" in message:
        return "'tool_calls' belongs to messages of the assistant only"
    if "content" not in message:
        return "it has no 'content'"
    return _content_problem(message["content"])


def _assistant_problem(message: dict[str, Any]) -> str | None:
    weight = message.get("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1):
        return f"'weight' must be 0 or 1, not {_shown(weight)}"
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            return "'tool_calls' must be a list"
        for number, call in enumerate(calls, start=1):
            if problem := _call_problem(call):
                return f"tool call {number}: {problem}"
    content = message.get("content")
    if content is None:
        return None if calls else "it has neither 'content' nor 'tool_calls'"
    return _content_problem(content) or (None if calls or _has_text(content) else "its 'content' is empty")


def _content_problem(content: Any) -> str | None:
    if isinstance(content, str):
        return None
    if not isinstance(content, list):
        return f"'content' must be a string, not {_shown(content)}"
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            return '\'content\' may only have parts of the form {"type": "text", "text": …}'
    return None


def _has_text(content: str | list[dict[str, Any]]) -> bool:
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return bool(text.strip())


def _call_problem(call: Any) -> str | None:
    if not _is_function(call):
        return 'it must be {"type": "function", "function": {"name": …, "arguments": …}}'
    arguments = call["function"].get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError:
            return "its 'arguments' are not valid JSON"
        except RecursionError:
            return "its 'arguments' are nested too deeply"
    return None if isinstance(arguments, dict) else "its 'arguments' must be a JSON object"


def _is_function(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("type") not in (None, "function"):
        return False
    function = value.get("function")
    return isinstance(function, dict) and isinstance(function.get("name"), str) and bool(function["name"])


def _shown(value: Any) -> str:
    """A value of the user's, short enough for a message."""
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 40 else text[:37] + "..."
