"""The OpenAPI document: bodies and answers described from the same structs that check and encode them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI

from cotenant.api.schemas.parsing import IGNORED_FIELDS

_REFERENCE = "#/components/schemas/{name}"
_EVENT_STREAM = {"text/event-stream": {"schema": {"type": "string"}}}
_DESCRIPTIONS = {
    400: "Something in the request is wrong; the message names it.",
    401: "The API key is missing or wrong.",
    404: "There is no such thing.",
    405: "The path does not take this method.",
    409: "Not in a state that allows this; the message says why.",
    413: "The body is too large.",
    500: "Something went wrong in the server.",
    503: "Over capacity, or the model is being loaded; come again after Retry-After seconds.",
}


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """What every error looks like."""

    error: ErrorDetail


def body_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """A route's ``openapi_extra`` for a JSON body that ``parsing.parse`` checks as a ``kind``."""
    content = {"application/json": {"schema": {"$ref": _REFERENCE.format(name=kind.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def answers(kind: type[msgspec.Struct] | None, *errors: int, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """A route's ``responses``: a ``kind`` (None: no JSON) on success, and errors by status."""
    content: dict[str, Any] = dict(_EVENT_STREAM) if streams else {}
    if kind is not None:
        content["application/json"] = {"schema": {"$ref": _REFERENCE.format(name=kind.__name__)}}
    described: dict[int | str, dict[str, Any]] = {200: {"description": "Success.", "content": content}}
    for status in errors:
        described[status] = {
            "description": _DESCRIPTIONS[status],
            "content": {"application/json": {"schema": {"$ref": _REFERENCE.format(name=ErrorBody.__name__)}}},
        }
    return described


def install(app: FastAPI, kinds: Sequence[type[msgspec.Struct]]) -> None:
    """Make ``app.openapi()`` include the schemas of ``kinds``, and no 422, which this server never sends."""
    build = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = build()
            _, components = msgspec.json.schema_components([*kinds, ErrorBody], ref_template=_REFERENCE)
            for schema in components.values():
                _allow_ignored(schema)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(components)
            schemas.pop("HTTPValidationError", None)
            schemas.pop("ValidationError", None)
            for operations in document["paths"].values():
                for operation in operations.values():
                    _replace_422(operation["responses"])
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _allow_ignored(schema: dict[str, Any]) -> None:
    """A body may also hold the fields that we ignore, whatever their value."""
    if schema.get("additionalProperties") is False and "model" in schema["properties"]:
        for name in sorted(IGNORED_FIELDS):
            schema["properties"].setdefault(name, {})


def _replace_422(responses: dict[str, Any]) -> None:
    if responses.pop("422", None) is not None and "400" not in responses:
        reference = {"$ref": _REFERENCE.format(name=ErrorBody.__name__)}
        responses["400"] = {"description": _DESCRIPTIONS[400], "content": {"application/json": {"schema": reference}}}
