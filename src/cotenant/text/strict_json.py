"""JSON as the standard has it, where Python's own reader takes more, or numbers that it cannot hold."""

from __future__ import annotations

import json
import math
from typing import Any


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError that says what is wrong (json.JSONDecodeError where the syntax is),
    for NaN, infinities and numbers that are too large, too; RecursionError for one that is nested too deeply."""
    return json.loads(text, parse_int=_whole_number, parse_float=_number, parse_constant=_refuse_constant)


def _whole_number(digits: str) -> int:
    try:
        return int(digits)
    except ValueError as error:  # Python's limit
        raise ValueError(f"a number of {len(digits)} digits is too long") from error


def _number(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits[:40]} is too large")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
