"""``/metrics``: Prometheus's text format. It needs no key."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from cotenant.api.state import state_of
from cotenant.store import StoreError

router = APIRouter(tags=["server"])

_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "All figures.", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


@router.get("/metrics", response_class=Response, responses=_RESPONSES)
async def metrics(request: Request) -> Response:
    """What the server has measured."""
    state = state_of(request)
    try:
        num_jobs = await asyncio.to_thread(state.store.jobs.counts)
    except StoreError:  # what serving does is of interest then, too: the jobs stay as they were
        num_jobs = {}
    text = state.metrics.render(num_jobs, state.store.jobs.ends())
    return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})
