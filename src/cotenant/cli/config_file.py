"""The YAML file of ``cotenant serve --config``: its settings by name, each of them once."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

import yaml

from cotenant.core.errors import InvalidInputError


def read_settings(file: Path) -> dict[Hashable, object]:
    """What the file says, under the names that it uses. Raises InvalidInputError, for a name that is there twice too:
    YAML itself would take the last one."""
    try:
        text = file.read_text(encoding="utf-8")
        twice = _found_twice(yaml.compose(text, Loader=yaml.SafeLoader))
        content = yaml.safe_load(text) if twice is None else None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"--config: {file} cannot be read: {error}", param="config") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # the others: of a date, say, and of deep nesting
        raise InvalidInputError(f"--config: {file} is not valid YAML: {error}", param="config") from error
    if twice is not None:
        name, first, second = twice
        lines = f"line {first}" if first == second else f"lines {first} and {second}"
        raise InvalidInputError(f"--config: {file}: '{name}' is there twice, {lines}", param="config")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidInputError(f"--config: {file} must hold a mapping of flag names to values", param="config")
    return content


def _found_twice(root: yaml.Node | None) -> tuple[str, int, int] | None:
    """The first name that a mapping has twice, dashes and underscores being the same, and the lines where it is."""
    nodes, seen = [root], set[int]()  # an anchor's node may come again, even within itself
    while nodes:
        node = nodes.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
        if not isinstance(node, yaml.MappingNode):
            continue
        lines: dict[str, int] = {}
        for key, value in node.value:
            nodes.append(value)
            if not isinstance(key, yaml.ScalarNode):
                continue
            name, line = key.value.replace("-", "_"), key.start_mark.line + 1
            if name in lines:
                return key.value, lines[name], line
            lines[name] = line
    return None
