"""Ids of everything that is stored. They are ours and random, so they can be parts of paths."""

from __future__ import annotations

import re
import secrets

_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
_LENGTH = 24
_SHORT_LENGTH = 8


def new_id(prefix: str) -> str:
    """A random id such as ``file-k3…``: the prefix, and 24 characters with 124 random bits."""
    return prefix + "".join(secrets.choice(_ALPHABET) for _ in range(_LENGTH))


def is_id(text: str, prefix: str) -> bool:
    """Whether ``text`` is an id that ``new_id`` makes with this prefix."""
    return re.fullmatch(f"{re.escape(prefix)}[{_ALPHABET}]{{{_LENGTH}}}", text) is not None


def short_id(long_id: str) -> str:
    """The first characters of an id's random part, for model names that people read."""
    return long_id[-_LENGTH:][:_SHORT_LENGTH]
