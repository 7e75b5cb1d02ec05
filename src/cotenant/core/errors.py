"""Errors that a user caused and can mend. Every layer raises these; the API turns them into OpenAI's shape."""

from __future__ import annotations

DISK_FULL = "disk_full"  # the code of what could not be written for want of room
INVALID_ADAPTER = "invalid_adapter"  # the code of an adapter that cannot be read


class CotenantError(Exception):
    """Base of all errors whose text is meant for the user: what is wrong, where, and what to do.

    ``code`` and ``param`` go into the API's error object unchanged.
    """

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param


class InvalidInputError(CotenantError):
    """The request, file or flag itself is wrong (HTTP 400)."""


class NotFoundError(CotenantError):
    """The named model, file or job does not exist (HTTP 404)."""


class ConflictError(CotenantError):
    """The thing exists, but not in a state that allows this (HTTP 409)."""


class OverloadedError(CotenantError):
    """More work than the server takes at once (HTTP 503 with ``Retry-After``)."""


class WorkerLostError(CotenantError):
    """The worker died after this request's first tokens had been sent, so it cannot be run again (HTTP 500)."""
