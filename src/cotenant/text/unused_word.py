"""Words to put into a text, to find them again in what becomes of it."""

from __future__ import annotations

import re


def unused_word(stem: str, text: str) -> str:
    """``stem``, a number and 'For', with the smallest number with which that does not occur in ``text``."""
    # In one pass: a text that holds many such words would be searched as often.
    used = set(re.findall(f"{re.escape(stem)}([0-9]+)For", text))
    number = 0
    while str(number) in used:
        number += 1
    return f"{stem}{number}For"
