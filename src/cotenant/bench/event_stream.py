"""Counting a stream of server-sent events without reading what they say.

A chunk that carries a choice is recognised by its bytes: ``"choices":[{`` cannot stand inside a JSON string, where its
quotes would be escaped. Only lines without it are parsed: usage, errors, the end.
"""

from __future__ import annotations

from array import array

import msgspec

_CHOICE = b'"choices":[{'
_CHOICE_WITH_SPACE = b'"choices": [{'
_DATA = b"data:"
_DONE = b"[DONE]"


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """What the server says it has counted."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that a prefix cache had; None when the server does not say."""
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class _Event(msgspec.Struct):
    usage: Usage | None = None
    error: dict[str, object] | str | None = None


_EVENT = msgspec.json.Decoder(_Event)


class EventStream:
    """One answer as it arrives. ``times`` holds the arrival of each chunk with a choice, in seconds of any clock."""

    __slots__ = ("_last_choice", "_rest", "error", "is_done", "times", "usage")

    def __init__(self) -> None:
        self.times = array("d")
        self.usage: Usage | None = None
        self.error: str | None = None
        self.is_done = False
        self._rest = b""
        self._last_choice = b""

    def feed(self, data: bytes, now_s: float) -> None:
        """Take the next bytes of the body, cut anywhere. Raises msgspec.DecodeError for an event that is not JSON."""
        if self._rest:
            data = self._rest + data
        *lines, self._rest = data.split(b"\n")
        for line in lines:
            if _CHOICE in line or _CHOICE_WITH_SPACE in line:
                self.times.append(now_s)
                self._last_choice = line
            elif line.startswith(_DATA):
                self._read_other(line[len(_DATA) :].strip())

    def finish(self) -> None:
        """Called at the end. Some servers send usage with the last choice and not after it."""
        if self.usage is None and self._last_choice:
            self._read_other(self._last_choice[len(_DATA) :].strip())

    def _read_other(self, data: bytes) -> None:
        if data == _DONE:
            self.is_done = True
            return
        event = _EVENT.decode(data)
        if event.usage is not None:
            self.usage = event.usage
        if event.error is not None:
            message = event.error.get("message", event.error) if isinstance(event.error, dict) else event.error
            self.error = str(message)
