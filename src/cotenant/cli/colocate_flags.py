"""What `cotenant bench colocate` is asked for, read from the command line's lists."""

from __future__ import annotations

import math

from cotenant.bench.comparison import REFERENCE
from cotenant.config import POLICIES
from cotenant.core.errors import InvalidInputError


def policies_of(text: str, *, skip_hopeless: bool) -> list[str]:
    """Their names, in the order in which they are measured. Raises InvalidInputError."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise InvalidInputError("--policies: which are to be measured?", param="policies")
    for name in names:
        if name not in POLICIES:
            raise InvalidInputError(
                f"--policies: each must be one of {', '.join(POLICIES)}, not {name!r}", param="policies"
            )
    if skip_hopeless and REFERENCE not in names:
        raise InvalidInputError(f"--skip-hopeless: --policies must have {REFERENCE}", param="skip-hopeless")
    return sorted(names, key=lambda name: name != REFERENCE) if skip_hopeless else names


def positive(text: str, flag: str) -> float:
    """One of a list. Raises InvalidInputError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InvalidInputError(f"--{flag}: expected numbers above 0, like 10,40, got {text.strip()!r}", param=flag)
    return value


def whole(text: str, flag: str) -> int:
    """As ``positive``."""
    value = positive(text, flag)
    if not value.is_integer():
        raise InvalidInputError(f"--{flag}: expected whole numbers, got {text.strip()!r}", param=flag)
    return int(value)
