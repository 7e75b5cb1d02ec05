"""Paths that a user gave, in whatever form."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cotenant.core.errors import InvalidInputError


@contextmanager
def looking_up(path: object, flag: str) -> Iterator[None]:
    """For what asks where ``path`` is, or what is there: what Python raises where no such path can be (a home that
    nobody has, a name that is too long, a null character) becomes InvalidInputError that names ``flag``."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        reason = str((error.strerror if isinstance(error, OSError) else None) or error).rstrip(".")
        message = f"{flag}: {str(path)!r} cannot be looked up: {reason}; name another path"
        raise InvalidInputError(message, param=flag.removeprefix("--").lower()) from error


def check_utf8(text: object, flag: str) -> None:
    """Raise InvalidInputError that names ``flag`` where a path, or another text, is not UTF-8: it could be written into
    no database, no message and no answer."""
    try:
        str(text).encode()
    except UnicodeEncodeError as error:
        message = f"{flag}: {str(text)!r} is not UTF-8; name another one"
        raise InvalidInputError(message, param=flag.removeprefix("--").lower()) from error
