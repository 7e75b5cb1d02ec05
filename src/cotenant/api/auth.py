"""The API key: it guards all that works for clients, and nothing else, so probes and scrapers need none."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from cotenant.api.errors import InvalidApiKeyError, log_refusal, response_of

_GUARDED = ("/v1", "/tokenize", "/detokenize")


def check_key(authorization: str | None, api_key: str) -> None:
    """Compare an ``Authorization`` header with the key in constant time; raise ``InvalidApiKeyError`` if it differs."""
    scheme, _, given = (authorization or "").partition(" ")
    given = given.strip(" \t")  # no others: the bytes of a key in UTF-8, which they may look like, are characters here
    if scheme.lower() != "bearer" or not given:
        raise InvalidApiKeyError(
            "No API key was given. Send it in the Authorization header: 'Authorization: Bearer YOUR_KEY'.",
            code="invalid_api_key",
        )
    if not hmac.compare_digest(given.encode("latin-1"), api_key.encode()):
        raise InvalidApiKeyError("The API key is not the one that this server expects.", code="invalid_api_key")


class ApiKeyMiddleware:
    """Refuse requests to what is guarded that don't carry the key, before any of their body is read."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _is_guarded(scope["path"]):
            try:
                check_key(Headers(scope=scope).get("authorization"), self._api_key)
            except InvalidApiKeyError as error:
                log_refusal(scope, 401, error.message)
                await response_of(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_guarded(path: str) -> bool:
    return any(path == guarded or path.startswith(guarded + "/") for guarded in _GUARDED)
