"""Chat templates: messages in, the prompt's text or token ids out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

from cotenant.core.errors import InvalidInputError
from cotenant.text.byte_tokenizer import BOS, BYTE_CHAT_TEMPLATE, EOS
from cotenant.text.example_format import REASONING_FIELDS
from cotenant.text.folder import read_json, special_tokens
from cotenant.text.template_environment import create_environment
from cotenant.text.tokenizer import Tokenizer
from cotenant.text.unused_word import unused_word

Message = Mapping[str, Any]

_INLINE_SIGNS = ("{{", "{%", "\n")
_DEFAULT, _TOOL_USE = "default", "tool_use"


class ChatTemplate:
    """A model's chat template with the texts of its special tokens.

    ``sources`` holds Jinja texts by name: ``default``, and ``tool_use`` where the model has another one for requests
    with tools. Without any, every use is an InvalidInputError: the model can still complete plain text.
    """

    def __init__(self, sources: Mapping[str, str], special_token_texts: Mapping[str, str], origin: str) -> None:
        environment = create_environment()
        self._special_token_texts = dict(special_token_texts)
        self._knows_developer = any("developer" in source for source in sources.values())
        self._knows_calls = any("tool_calls" in source for source in sources.values())
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise InvalidInputError(
                f"The chat template from {origin} is broken in line {error.lineno}: {error.message}",
                param="chat-template",
            ) from error

    @property
    def available(self) -> bool:
        return bool(self._templates)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The conversation as the model reads it. ``kwargs`` are further variables of the template.

        Of the forms in which templates want calls of tools, the first that the template writes all calls of, else the
        one with the most of them.
        InvalidInputError if there is no template, or if it refuses these messages.
        """
        template = self._choose(tools)
        variables = {
            "documents": None,
            **self._special_token_texts,
            **kwargs,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        plain = plain_messages(messages, self._knows_developer)
        refusal: Exception | None = None
        best: tuple[int, str] | None = None
        for form in _forms(plain):
            try:
                text = template.render(variables, messages=form)
            except Exception as error:  # a template is code of somebody else: whatever it raises is about its input
                refusal = refusal or error
                continue
            num_unwritten = _num_unwritten_calls(template, variables, form, text) if self._knows_calls else 0
            if best is None or num_unwritten < best[0]:
                best = (num_unwritten, text)
            if not num_unwritten:
                break
        if best is not None:
            return best[1]
        reason = str(refusal) if isinstance(refusal, jinja2.TemplateError) else f"{type(refusal).__name__}: {refusal}"
        raise InvalidInputError(
            f"The model's chat template refuses these messages: {reason}", param="messages"
        ) from refusal

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """``render`` and encode. No start token is added: the template writes its own."""
        text = self.render(messages, tools, add_generation_prompt, **kwargs)
        return tokenizer.encode(text, add_special_tokens=False)

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> jinja2.Template:
        if not self._templates:
            raise InvalidInputError(
                "This model has no chat template, so it takes no messages. Start the server with --chat-template, "
                "or use /v1/completions",
                code="chat_template_missing",
                param="messages",
            )
        if tools and _TOOL_USE in self._templates:
            return self._templates[_TOOL_USE]
        return self._templates.get(_DEFAULT) or next(iter(self._templates.values()))


def load_chat_template(folder: Path | None, override: str | None) -> ChatTemplate:
    """The chat template of a model folder, the operator's own, or the byte tokenizer's (no folder).

    ``override`` is a path, or the template itself: any text with ``{{``, ``{%`` or a line break in it. Only that very
    path is read. The folder's is ``chat_template.jinja``, else ``chat_template`` in ``tokenizer_config.json``.
    """
    if override is not None:
        texts = {"bos_token": BOS, "eos_token": EOS} if folder is None else special_tokens(folder)
        source, origin = _read_override(override)
        return ChatTemplate({_DEFAULT: source}, texts, origin)
    if folder is None:
        return ChatTemplate({_DEFAULT: BYTE_CHAT_TEMPLATE}, {"bos_token": BOS, "eos_token": EOS}, "cotenant")
    return ChatTemplate(_folder_sources(folder), special_tokens(folder), str(folder))


def _read_override(override: str) -> tuple[str, str]:
    if any(sign in override for sign in _INLINE_SIGNS):
        return override, "--chat-template"
    path = Path(override)
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"--chat-template: cannot read the file {override!r}, and it is no template either: {error}",
            param="chat-template",
        ) from error


def _folder_sources(folder: Path) -> dict[str, str]:
    """The templates by name; one in a file goes before those of the configuration."""
    paths = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    main = folder / "chat_template.jinja"
    if main.is_file():
        sources = {_DEFAULT: _read_template(main)}
    else:
        sources = _declared_sources(read_json(folder / "tokenizer_config.json").get("chat_template"))
    return sources | {name: _read_template(path) for name, path in paths.items()}


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"Cannot read {path}: {error}", param="model") from error


def _declared_sources(declared: Any) -> dict[str, str]:
    if isinstance(declared, str):
        return {_DEFAULT: declared}
    if isinstance(declared, list):
        return {
            str(entry["name"]): str(entry["template"])
            for entry in declared
            if isinstance(entry, dict) and "name" in entry and "template" in entry
        }
    return {}


def plain_messages(messages: Sequence[Message], knows_developer: bool = True) -> list[dict[str, Any]]:
    """The messages as templates expect them: no empty keys, text parts joined by line breaks, the arguments of tool
    calls as objects, reasoning by the name that templates know, and ``developer``, where the template has never heard
    of it, called ``system``."""
    if not messages:
        raise InvalidInputError("There are no messages", param="messages")
    return [_plain_message(message, index, knows_developer) for index, message in enumerate(messages)]


def _plain_message(message: Message, index: int, knows_developer: bool) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if value is not None}
    if not plain.get("tool_calls", True):
        del plain["tool_calls"]
    if plain.get("role") == "developer" and not knows_developer:
        plain["role"] = "system"
    reasoning = next((plain[name] for name in REASONING_FIELDS if name in plain), None)
    if reasoning is not None:  # as transformers does it: templates read the first name, gpt-oss's the second
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    if isinstance(plain.get("content"), (list, tuple)):
        plain["content"] = "\n".join(_part_text(part, index) for part in plain["content"])
    return _with_each_call(plain, _plain_tool_call)


def _part_text(part: Any, index: int) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidInputError(
        f"messages[{index}].content has a part of type {kind!r}; only parts of type 'text' are supported",
        param=f"messages[{index}].content",
    )


def _plain_tool_call(call: Any) -> Any:
    """Clients send arguments as JSON text, or nothing for none; templates write objects as JSON themselves."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    arguments = call["function"].get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    elif isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _forms(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The messages, then calls of tools as some templates want them: with an empty content, or with a null one, and
    then with the arguments as text."""
    yield messages
    if any("tool_calls" in message for message in messages):
        yield [{"content": "", **message} for message in messages]
        bare = [_with_null_content(message) for message in messages]
        for written in (_JsonObject, _json_text):
            yield [_with_each_call(message, partial(_with_arguments, written=written)) for message in bare]


def _with_null_content(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": (content or None) if "tool_calls" in message else content}


def _with_each_call(message: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    if not isinstance(message.get("tool_calls"), (list, tuple)):
        return message
    return {**message, "tool_calls": [change(call) for call in message["tool_calls"]]}


def _with_arguments(call: Any, written: Callable[[Mapping[str, Any]], Any]) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, Mapping):
        return call
    return {**call, "function": {**call["function"], "arguments": written(arguments)}}


def _json_text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


class _JsonObject(dict[str, Any]):
    """An object that prints as JSON, for templates that expect text and only print it."""

    def __str__(self) -> str:
        return _json_text(self)


def _num_unwritten_calls(
    template: jinja2.Template, variables: Mapping[str, Any], messages: list[dict[str, Any]], text: str
) -> int:
    """How many calls of ``messages`` are missing from ``text``, which the template made of them.

    A function's name may stand in the text for another reason, so the messages are rendered once more with names that
    occur nowhere else. No call is missing if the template refuses those names: it has looked at them.
    """
    word = unused_word("CalledFunction", text)
    marks: list[str] = []

    def mark(call: Any) -> Any:
        if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
            return call
        marks.append(f"{word}{len(marks)}E")
        return {**call, "function": {**call["function"], "name": marks[-1]}}

    marked = [_with_each_call(message, mark) for message in messages]
    if not marks:
        return 0
    try:
        text = template.render(variables, messages=marked)
    except Exception:
        return 0
    # In one pass: each mark looked for by itself would be as many of them.
    written = set(re.findall(f"{word}[0-9]+E", text))
    return sum(name not in written for name in marks)
