"""The shape of one example of preferences (DPO), in OpenAI's format or TRL's, and what is wrong with it.

OpenAI: ``{"input": {"messages": […], "tools": […]}, "preferred_output": […], "non_preferred_output": […]}``.
TRL: ``{"prompt": …, "chosen": …, "rejected": …}``, each a list of messages or a text, which stands for one message;
``prompt`` may be left out where ``chosen`` and ``rejected`` are whole conversations that begin alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cotenant.text.example_format import message_fields, message_problem, tools_problems, without_nulls

Message = Mapping[str, Any]

_OPENAI_FIELDS = ("input", "preferred_output", "non_preferred_output")
_TRL_FIELDS = ("prompt", "chosen", "rejected")
_OUTPUT_ROLES = ("assistant", "tool")
# What a field may hold.
_LIST = "a list with at least one message"
_TEXT_OR_LIST = f"a text or {_LIST}"


class PreferenceError(Exception):
    """What is wrong with an example, each text in the words that follow 'Line 57'."""


@dataclass(frozen=True, slots=True)
class Preference:
    """A prompt and two answers to it. ``fields``: what the example calls the two, for messages about them."""

    prompt: Sequence[Message]
    chosen: Sequence[Message]
    rejected: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None
    fields: tuple[str, str]


def read_preference(example: Mapping[str, Any]) -> Preference:
    """The example in one form. Raises PreferenceError with all that is wrong."""
    given = without_nulls(example).keys()
    if not given.isdisjoint(_OPENAI_FIELDS):
        preference, problems = _openai(example)
    elif not given.isdisjoint(_TRL_FIELDS):
        preference, problems = _trl(example)
    else:
        hint = "it has 'messages', which is for method.type 'supervised'; " if "messages" in given else ""
        raise PreferenceError(
            f": {hint}a preference example needs 'input', 'preferred_output' and 'non_preferred_output' "
            "(or 'prompt', 'chosen' and 'rejected')"
        )
    if problems or preference is None:
        raise PreferenceError(*problems)
    return preference


def _openai(example: Mapping[str, Any]) -> tuple[Preference | None, list[str]]:
    problems = _missing(example, _OPENAI_FIELDS)
    given = example.get("input")
    prompt: Any = None
    tools = None
    if isinstance(given, dict):
        if given.get("messages") is None:
            problems.append(", 'input': it has no 'messages'")
        else:
            prompt = given["messages"]
            problems += _prompt_problems(prompt, "input.messages", _LIST)
        problems += [f", 'input': {problem}" for problem in tools_problems(given)]
        tools = given.get("tools")
    elif given is not None:
        problems.append(", 'input': it must be a dictionary with 'messages'")
    for name in _OPENAI_FIELDS[1:]:
        if example.get(name) is not None:
            problems += _output_problems(example[name], name, _LIST)
    if problems:
        return None, problems
    return Preference(
        prompt, example["preferred_output"], example["non_preferred_output"], tools, _OPENAI_FIELDS[1:]
    ), []


def _trl(example: Mapping[str, Any]) -> tuple[Preference | None, list[str]]:
    problems = _missing(example, _TRL_FIELDS[1:])
    if problems:
        return None, problems
    chosen, rejected = (_as_messages(example[name], "assistant") for name in _TRL_FIELDS[1:])
    if example.get("prompt") is not None:
        prompt = _as_messages(example["prompt"], "user")
        problems += _prompt_problems(prompt, "prompt", _TEXT_OR_LIST)
    elif isinstance(chosen, list) and isinstance(rejected, list):
        length = _num_shared(chosen, rejected)
        prompt, again = chosen[:length], rejected[:length]
        chosen, rejected = chosen[length:], rejected[length:]
        if not prompt:  # so it is not known where the answers begin, and which of the messages to look at as theirs
            return None, [" has no 'prompt', and 'chosen' and 'rejected' do not begin with the same messages"]
        problems += _prompt_problems(prompt, "chosen", _LIST) or _prompt_problems(again, "rejected", _LIST)
    for name, output in (("chosen", chosen), ("rejected", rejected)):
        # Without a prompt a text will not do: nothing of it could be the prompt.
        problems += _output_problems(output, name, _LIST if example.get("prompt") is None else _TEXT_OR_LIST)
    problems += [f": {problem}" for problem in tools_problems(example)]
    if problems:
        return None, problems
    return Preference(prompt, chosen, rejected, example.get("tools"), _TRL_FIELDS[1:]), []


def _missing(example: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    return [f" has no '{name}'" for name in names if example.get(name) is None]


def _as_messages(value: Any, role: str) -> Any:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _num_shared(chosen: list[Any], rejected: list[Any]) -> int:
    """How many messages both begin with, at least one being left of each where they have one to spare."""
    pairs = zip(map(_compared, chosen[:-1]), map(_compared, rejected[:-1]), strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)) - 1)


def _compared(message: Any) -> Any:
    """A message of a prompt: it is context, whatever its ``weight``."""
    if not isinstance(message, dict):
        return message
    return {key: value for key, value in message_fields(message).items() if key != "weight"}


def _prompt_problems(messages: Any, field: str, form: str) -> list[str]:
    if not isinstance(messages, list) or not messages:
        return [f", '{field}': it must be {form}"]
    return _each_message(messages, field)


def _output_problems(messages: Any, field: str, form: str) -> list[str]:
    if not isinstance(messages, list) or not messages:
        return [f", '{field}': it must be {form}"]
    problems = _each_message(messages, field)
    if not problems:
        problems = [
            f", '{field}', message {number}: its role is '{message['role']}'; an answer is the assistant's"
            for number, message in enumerate(messages, start=1)
            if message["role"] not in _OUTPUT_ROLES
        ]
    if not problems:
        problems = [
            f", '{field}', message {number}: 'weight' is for method.type 'supervised'; all that an answer says counts"
            for number, message in enumerate(messages, start=1)
            if message.get("weight") is not None
        ]
    if not problems and messages[-1]["role"] != "assistant":
        problems = [f", '{field}': its last message must be the assistant's"]
    return problems


def _each_message(messages: Sequence[Any], field: str) -> list[str]:
    return [
        f", '{field}', message {number}: {problem}"
        for number, message in enumerate(messages, start=1)
        if (problem := message_problem(message))
    ]
