"""OpenAI's error shape, and which HTTP status each of our errors becomes. No stack trace ever leaves the server."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Scope

from cotenant.core.errors import ConflictError, CotenantError, InvalidInputError, NotFoundError, OverloadedError
from cotenant.store.files import FileTooLargeError

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
CLIENT_CLOSED_REQUEST = 499  # nginx's number for "the client went away"; nobody is left to read it


class InvalidApiKeyError(CotenantError):
    """The key is missing or wrong (HTTP 401)."""


class RequestTooLargeError(InvalidInputError):
    """A body is larger than the limit (HTTP 413)."""


# The first that an error is one of counts. Those of none are what the user did not cause.
_STATUS_OF_ERROR: tuple[tuple[type[CotenantError], int], ...] = (
    (InvalidApiKeyError, 401),
    (RequestTooLargeError, 413),
    (FileTooLargeError, 413),
    (InvalidInputError, 400),
    (NotFoundError, 404),
    (ConflictError, 409),
    (OverloadedError, 503),
)
# Paths of OpenAI's API, with all below them, that clients ask for and nothing here answers.
_NOT_SERVED = tuple(
    f"/v1/{name}"
    for name in (
        "assistants", "audio", "batches", "containers", "conversations", "embeddings", "evals", "images", "moderations",
        "realtime", "responses", "threads", "uploads", "vector_stores", "videos",
    )
)  # fmt: skip
_MOST_CHARACTERS = 1000  # of a path or a message, in the log and of a path in a message
_ENCODER = msgspec.json.Encoder()


def status_of(error: CotenantError) -> int:
    """The HTTP status of one of our errors; 500 for what the user did not cause."""
    return next((status for kind, status in _STATUS_OF_ERROR if isinstance(error, kind)), 500)


def error_object(message: str, status: int, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON object ``{"error": …}``, whose type follows from the status."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_object_of(error: Exception) -> dict[str, Any]:
    """The same for an exception; one that is not ours tells the client nothing of its text."""
    if isinstance(error, CotenantError):
        return error_object(error.message, status_of(error), param=error.param, code=error.code)
    return error_object("The server had an error while processing the request.", 500, code="internal_error")


def error_response(
    message: str,
    status: int,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """An error as a whole HTTP response."""
    body = _ENCODER.encode(error_object(message, status, param=param, code=code))
    return Response(body, status_code=status, media_type="application/json", headers=headers)


def response_of(error: CotenantError) -> Response:
    """One of our errors as a whole HTTP response; 503 says when to come again."""
    status = status_of(error)
    headers: dict[str, str] = {}
    if status == 503:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return error_response(error.message, status, param=error.param, code=error.code, headers=headers)


def request_id_of(request: Request) -> str:
    """The id that the middleware gave this HTTP request."""
    return str(getattr(request.state, "request_id", "-"))


def _cut(words: str) -> str:
    """What a client has sent may be long, and says no more for that."""
    return words if len(words) <= _MOST_CHARACTERS else f"{words[:_MOST_CHARACTERS]}..."


def log_refusal(scope: Scope, status: int, message: str) -> None:
    """One line for a request that gets an error instead of an answer."""
    level = logging.WARNING if status >= 500 else logging.INFO
    request_id = scope.get("state", {}).get("request_id", "-")
    # What a client named may stand in them, with line breaks of its own.
    path, text = (
        "".join(each if each.isprintable() else repr(each)[1:-1] for each in _cut(words))
        for words in (scope["path"], message)
    )
    logger.log(level, "%s: %s %s: %d: %s", request_id, scope["method"], path, status, text)


def internal_error_response() -> Response:
    """What the client sees of an error that we did not foresee."""
    body = _ENCODER.encode(error_object_of(RuntimeError()))
    return Response(body, status_code=500, media_type="application/json")


def install_handlers(app: FastAPI, on_overload: Callable[[], None]) -> None:
    """Answer every error of the application in OpenAI's shape. ``on_overload`` is told of each request that is refused
    for lack of room, or of a model that is ready."""

    async def on_cotenant_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, CotenantError)
        status = status_of(error)
        if isinstance(error, OverloadedError):
            on_overload()
        log_refusal(request.scope, status, error.message)
        return response_of(error)

    async def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        message, param = _describe_validation_error(error)
        log_refusal(request.scope, 400, message)
        return error_response(message, 400, param=param, code="invalid_value")

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        refusal = _http_refusal(app, request, error)
        log_refusal(request.scope, error.status_code, refusal.message)
        return error_response(refusal.message, error.status_code, code=refusal.code, headers=refusal.headers)

    async def on_disconnect(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(CotenantError, on_cotenant_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientDisconnect, on_disconnect)


def _describe_validation_error(error: RequestValidationError) -> tuple[str, str | None]:
    """FastAPI's first complaint as one sentence, and the parameter it is about."""
    first = error.errors()[0]
    place = [str(part) for part in first.get("loc", ()) if part not in ("body", "query", "path", "header")]
    param = ".".join(place) or None
    reason = str(first.get("msg", "invalid value"))
    return (f"Invalid '{param}': {reason}." if param else f"Invalid request: {reason}."), param


class _Refusal(NamedTuple):
    message: str
    headers: dict[str, str]
    code: str | None = None


def _http_refusal(app: FastAPI, request: Request, error: HTTPException) -> _Refusal:
    headers = dict(error.headers or {})
    path = _cut(request.url.path)
    if error.status_code == 404 and error.detail == HTTPStatus.NOT_FOUND.phrase:
        if any(path == known or path.startswith(known + "/") for known in _NOT_SERVED):
            message = f"This server does not support {request.method} {path}; /openapi.json describes what it does."
            return _Refusal(message, {}, code="unsupported_endpoint")
        message = f"Unknown request URL: {request.method} {path}. Please check the URL for typos."
        return _Refusal(message, {}, code="unknown_url")
    if error.status_code == 405:
        headers["Allow"] = ", ".join(allowed_methods(app, path)) or headers.get("Allow", "")
        message = f"Not allowed to {request.method} on {path} (allowed: {headers['Allow']})."
        return _Refusal(message, headers, code="method_not_allowed")
    return _Refusal(str(error.detail), headers)


def allowed_methods(app: FastAPI, path: str) -> list[str]:
    """All methods that some route answers on ``path``, from the application's own OpenAPI document."""
    methods: set[str] = set()
    for template, operations in app.openapi()["paths"].items():
        pattern = re.sub(r"\\\{(\w+)\\\}", _parameter_pattern, re.escape(template))
        if re.fullmatch(pattern, path):
            methods.update(method.upper() for method in operations)
    return sorted(methods)


def _parameter_pattern(match: re.Match[str]) -> str:
    return ".+" if match.group(1) == "model_id" else "[^/]+"  # only a model's id may contain a slash
