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
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        config = read_json(folder / name)
        entries = {key: config.get(key) for key in SPECIAL_TOKEN_KEYS}
        extra = config.get("extra_special_tokens")
        if isinstance(extra, dict):
            entries.update(extra)
        for key, value in entries.items():
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[key] = text
    return found
