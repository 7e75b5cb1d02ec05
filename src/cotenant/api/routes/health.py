"""``/health`` for probes and ``/version``. Neither needs a key."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

import cotenant
from cotenant.api.errors import RETRY_AFTER_S, error_response
from cotenant.api.openapi import answers
from cotenant.api.responses import json_response
from cotenant.api.state import state_of

router = APIRouter(tags=["server"])


class Version(msgspec.Struct):
    version: str


@router.head("/health", include_in_schema=False)  # as some balancers ask
@router.get("/health", responses=answers(None, 503))
async def health(request: Request) -> Response:
    """200 once the model is loaded; 503 before, while the worker is being restarted, and while it says nothing."""
    worker = state_of(request).worker
    if worker.serves:
        return Response(status_code=200)
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    if worker.ready is None:
        was_ready = worker.last_ready is not None
        text = "The model's worker is being restarted." if was_ready else "The model is not loaded yet."
        return error_response(text, 503, code="model_loading", headers=headers)
    text = f"The model's worker has said nothing for {worker.watch.silent_s:.0f} s; it may hang."
    return error_response(text, 503, code="worker_silent", headers=headers)


@router.get("/version", responses=answers(Version))
async def version() -> Response:
    """The version of the server."""
    return json_response(Version(cotenant.__version__))
