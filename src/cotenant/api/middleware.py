"""What surrounds every HTTP request: its id, a limit on its body, and the last catch for errors.

Plain ASGI, because a middleware that wraps responses would sit between a token and its client.
"""

from __future__ import annotations

import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cotenant.api.errors import RequestTooLargeError, internal_error_response, log_refusal, response_of
from cotenant.core.errors import InvalidInputError
from cotenant.store.files import FileTooLargeError

logger = logging.getLogger(__name__)

MAX_JSON_BYTES = 8 * 1024 * 1024
UPLOAD_PATH = "/v1/files"
# Where a request's scope has the way of a body's parts to the server, past all that only looks at a response's start.
BODY_SEND = "cotenant.body_send"
_UPLOAD_FRAME_BYTES = 1024 * 1024  # what multipart adds around the file itself
_CLIENT_ID = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")


class RequestContextMiddleware:
    """Give each request an id (the client's ``x-request-id`` if it is a plain one), return it in the response's
    header, and turn an error that nobody handled into a 500 that tells nothing but is logged with the id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _CLIENT_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        scope[BODY_SEND] = send
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            if started:
                raise  # the server closes the connection, which tells the client that the body is incomplete
            logger.exception("%s: unexpected error in %s %s", request_id, scope["method"], scope["path"])
            await internal_error_response()(scope, receive, send_with_id)


class BodyLimitMiddleware:
    """Refuse bodies over the limit with 413, by their announced size or as soon as they have grown past it."""

    def __init__(self, app: ASGIApp, max_upload_bytes: int) -> None:
        self._app = app
        self._max_upload_bytes = max_upload_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit_bytes = self._limit_bytes(scope["path"])
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit() and int(announced) > limit_bytes:
            error = self._too_large(scope["path"])
            log_refusal(scope, 413, error.message)
            await response_of(error)(scope, receive, send)
            return
        received_bytes = 0

        async def counted_receive() -> Message:
            nonlocal received_bytes
            message = await receive()
            if message["type"] == "http.request":
                received_bytes += len(message.get("body", b""))
                if received_bytes > limit_bytes:
                    raise self._too_large(scope["path"])
            return message

        await self._app(scope, counted_receive, send)

    def _limit_bytes(self, path: str) -> int:
        return self._max_upload_bytes + _UPLOAD_FRAME_BYTES if path == UPLOAD_PATH else MAX_JSON_BYTES

    def _too_large(self, path: str) -> InvalidInputError:
        if path == UPLOAD_PATH:  # what is around a file is never that large
            return FileTooLargeError(self._max_upload_bytes)
        message = f"The request body is larger than {MAX_JSON_BYTES} bytes, the most that this endpoint takes."
        return RequestTooLargeError(message, code="request_too_large")
