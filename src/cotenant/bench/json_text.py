"""What was measured as JSON, which has no word for what is no number."""

from __future__ import annotations

import json
import math


def json_text(content: object, *, indent: int | None = None, ensure_ascii: bool = True) -> str:
    """One value of JSON and a newline. NaN and infinity, which stand where nothing was measured, are null."""
    text = json.dumps(_finite(content), indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)
    return text + "\n"


def _finite(content: object) -> object:
    match content:
        case float():
            return content if math.isfinite(content) else None
        case dict():
            return {key: _finite(value) for key, value in content.items()}
        case list() | tuple():
            return [_finite(value) for value in content]
    return content
