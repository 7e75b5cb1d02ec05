"""The small JSON files that lie beside a model's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cotenant.core.errors import InvalidInputError

SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``, or an empty one where there is no such file. InvalidInputError if it is broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"Cannot read {path}: {error}", param="model") from error
    if not isinstance(value, dict):
        raise InvalidInputError(f"Cannot read {path}: it holds no JSON object", param="model")
    return value


def special_tokens(folder: Path) -> dict[str, str]:
    """The texts of the special tokens by their name (``bos_token`` …), from the files that transformers reads."""
    entries = special_token_entries(folder).items()
    return {name: entry["content"] if isinstance(entry, dict) else entry for name, entry in entries}


def special_token_entries(folder: Path) -> dict[str, str | dict[str, Any]]:
    """The same as the files have them: texts, or objects with a text in ``content``. In transformers' order."""
    found: dict[str, str | dict[str, Any]] = dict.fromkeys(SPECIAL_TOKEN_KEYS, "")
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        config = read_json(folder / name)
        entries = {key: value for key, value in config.items() if key.endswith("_token")}
        extra = config.get("extra_special_tokens")
        if isinstance(extra, dict):
            entries.update(extra)
        for key, value in entries.items():
            if isinstance(value.get("content") if isinstance(value, dict) else value, str):
                found[key] = value
    return {name: entry for name, entry in found.items() if entry}
