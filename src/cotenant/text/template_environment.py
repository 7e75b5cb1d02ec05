"""The Jinja environment that chat templates are written for: the one of transformers, sandboxed, without a loader.

Templates come with a model and are code that somebody else wrote: they see plain JSON data and a clock, no files and no
other templates.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class GenerationTag(jinja2.ext.Extension):
    """``{% generation %} … {% endgeneration %}``: what a template's author declares to be the model's part.

    The text between is rendered unchanged, between the two ``generation_marks`` of the context if it has any.
    """

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = jinja2.nodes.ContextReference()
        return jinja2.nodes.CallBlock(self.call_method("_enclose", [marks]), [], [], body).set_lineno(line)

    def _enclose(self, context: jinja2.runtime.Context, caller: Callable[[], str]) -> str:
        marks: tuple[str, str] | None = context.get("generation_marks")
        text = caller()
        return text if marks is None else marks[0] + text + marks[1]


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which a model has never seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def create_environment() -> ImmutableSandboxedEnvironment:
    """A fresh environment; templates of different models share nothing."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment
