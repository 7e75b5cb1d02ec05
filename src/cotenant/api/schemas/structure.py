"""How many values a JSON body may have. To make them holds up the whole process, other clients' streams included, for
as long as there are many; text within a string costs next to nothing, whatever it says, and is never counted."""

from __future__ import annotations

import msgspec

from cotenant.api.schemas.sampling import MAX_TOKEN_IDS
from cotenant.core.errors import InvalidInputError

MAX_STRINGS = 1 << 17  # a chat of 18,000 messages in parts
MAX_CONTAINERS = 1 << 17
MAX_VALUES = MAX_TOKEN_IDS + (1 << 16)  # a list of token ids as long as any may be, and what else there is
MAX_LONG_NUMBERS_BYTES = 1 << 16  # of all that have 16 characters or more; a token's id has 10 at most
_LONG_NUMBER = b"0" * 16
_TO_ZEROS = bytes.maketrans(b"123456789.eE+-", b"0" * 14)
# A body of so many bytes has room for no more than that of anything.
SMALL_BODY_BYTES = min(MAX_STRINGS, MAX_CONTAINERS, MAX_VALUES, MAX_LONG_NUMBERS_BYTES)


def check_structure(body: bytes) -> None:
    """Raise ``InvalidInputError`` if a JSON body has too many values. For a thread: each step of it is short, and there
    is no more than some dozen of them.

    Raises what ``msgspec.json.decode`` does for a body that is no JSON besides. One that passes may be no JSON, but
    what comes before its first flaw has no more values than these.
    """
    if not _excess(body.count(b'"') // 2, body):  # text is counted here, too: there is seldom that much of it
        return
    text = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    num_strings = text.count(b'"') // 2
    between = b"" if num_strings > MAX_STRINGS else b"".join(text.split(b'"')[::2])
    if excess := _excess(num_strings, between):
        msgspec.json.decode(body, type=msgspec.Raw)  # makes nothing of it
        raise InvalidInputError(
            f"The request body has {excess}, which is the most that is taken. Text within a string does not count. "
            "Send it in several requests, or as fewer and longer strings.",
            code="request_too_complex",
        )


def _excess(num_strings: int, between: bytes) -> str | None:
    """What there is too much of; None if nothing. ``between``: what stands between the strings."""
    num_containers = between.count(b"[") + between.count(b"{")
    long_numbers_bytes = len(_LONG_NUMBER) * between.translate(_TO_ZEROS).count(_LONG_NUMBER)
    for count, most, what in (
        (num_strings, MAX_STRINGS, "strings, the names of fields among them"),
        (num_containers, MAX_CONTAINERS, "arrays and objects"),
        (between.count(b",") + 1, MAX_VALUES, "values in its arrays and objects"),
        (long_numbers_bytes, MAX_LONG_NUMBERS_BYTES, f"characters in numbers of {len(_LONG_NUMBER)} and more"),
    ):
        if count > most:
            return f"more than {most} {what}"
    return None
