"""Structs as JSON responses."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

_ENCODER = msgspec.json.Encoder()


def json_response(body: msgspec.Struct) -> Response:
    """``body`` as the whole answer, status 200."""
    return Response(_ENCODER.encode(body), media_type="application/json")
