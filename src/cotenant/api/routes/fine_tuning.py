"""``/v1/fine_tuning/jobs``: create, look at, and stop fine-tuning jobs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from cotenant.api.jobs.create import MAX_METADATA, CreateJobRequest
from cotenant.api.jobs.failures import as_shown
from cotenant.api.jobs.shapes import (
    CheckpointList,
    EventList,
    Job,
    JobDeleted,
    JobList,
    checkpoint_list,
    event_list,
    job_list,
    job_of,
)
from cotenant.api.openapi import answers, body_of
from cotenant.api.responses import json_response
from cotenant.api.schemas.parsing import parse, read_object
from cotenant.api.state import state_of
from cotenant.core.errors import InvalidInputError
from cotenant.store import JobRecord, Store

router = APIRouter(tags=["fine-tuning"])

JOBS = "/v1/fine_tuning/jobs"
DOCUMENTED = (CreateJobRequest, Job, JobList, JobDeleted, EventList, CheckpointList)
MAX_LISTED = 1000

After = Annotated[str | None, Query(description="The id of the last item of the page before.")]
Limit = Annotated[int, Query(ge=1, le=MAX_LISTED)]

_METADATA = re.compile(r"metadata\[(.*)\]", re.DOTALL)


@router.post(JOBS, openapi_extra=body_of(CreateJobRequest), responses=answers(Job, 400, 401, 404, 503))
async def create_job(request: Request) -> Response:
    """Create a job. Its files are validated afterwards."""
    body = parse(await read_object(request), CreateJobRequest)
    return await _answer(request, state_of(request).jobs.create(body))


@router.get(JOBS, responses=answers(JobList, 400, 401))
async def list_jobs(request: Request, after: After = None, limit: Limit = 20) -> Response:
    """The jobs, newest first. ``metadata[KEY]=VALUE`` keeps those that have it, ``metadata=null`` those without any."""
    state = state_of(request)
    page = await asyncio.to_thread(state.store.jobs.page, after=after, limit=limit, metadata=_metadata_filter(request))
    if any(record.error is not None for record in page.items):
        page = replace(page, items=await asyncio.to_thread(_as_shown, state.store, page.items))
    return json_response(job_list(page, state.config.api.organization))


@router.get(JOBS + "/{job_id}", responses=answers(Job, 401, 404))
async def retrieve_job(request: Request, job_id: str) -> Response:
    """One job."""
    return await _answer(request, asyncio.to_thread(state_of(request).store.jobs.get, job_id))


@router.post(JOBS + "/{job_id}/cancel", responses=answers(Job, 400, 401, 404))
async def cancel_job(request: Request, job_id: str) -> Response:
    """End a job. Its checkpoints stay."""
    return await _answer(request, state_of(request).jobs.cancel(job_id))


@router.post(JOBS + "/{job_id}/pause", responses=answers(Job, 400, 401, 404))
async def pause_job(request: Request, job_id: str) -> Response:
    """Set a job aside; the next one in the queue may run."""
    return await _answer(request, state_of(request).jobs.pause(job_id))


@router.post(JOBS + "/{job_id}/resume", responses=answers(Job, 400, 401, 404))
async def resume_job(request: Request, job_id: str) -> Response:
    """Put a paused job back into the queue, or one that has failed for what can be mended from outside: for want of
    space or memory, say. It goes on from its newest checkpoint."""
    return await _answer(request, state_of(request).jobs.resume(job_id))


@router.get(JOBS + "/{job_id}/events", responses=answers(EventList, 400, 401, 404))
async def list_events(request: Request, job_id: str, after: After = None, limit: Limit = 20) -> Response:
    """What happened in a job, newest first."""
    store = state_of(request).store
    job = await asyncio.to_thread(store.jobs.get, job_id)
    return json_response(event_list(await asyncio.to_thread(store.events.page, job.id, after=after, limit=limit)))


@router.get(JOBS + "/{job_id}/checkpoints", responses=answers(CheckpointList, 400, 401, 404))
async def list_checkpoints(request: Request, job_id: str, after: After = None, limit: Limit = 10) -> Response:
    """A job's checkpoints, the last step's first."""
    store = state_of(request).store
    job = await asyncio.to_thread(store.jobs.get, job_id)
    page = await asyncio.to_thread(store.events.checkpoint_page, job.id, after=after, limit=limit)
    return json_response(checkpoint_list(page))


@router.delete(JOBS + "/{job_id}", responses=answers(JobDeleted, 401, 404, 409, 500))
async def delete_job(request: Request, job_id: str) -> Response:
    """Delete a job that has ended: its record, events, models and files, but not those of ``/v1/files``."""
    await state_of(request).jobs.delete(job_id)
    return json_response(JobDeleted(id=job_id))


async def _answer(request: Request, found: Awaitable[JobRecord]) -> Response:
    state, record = state_of(request), await found
    if record.error is not None:
        (record,) = await asyncio.to_thread(_as_shown, state.store, [record])
    return json_response(job_of(record, state.config.api.organization))


def _as_shown(store: Store, records: Sequence[JobRecord]) -> list[JobRecord]:
    return [as_shown(record, store.jobs.folder(record.id)) for record in records]


def _metadata_filter(request: Request) -> dict[str, str] | None:
    """The pairs of ``metadata[KEY]=VALUE`` in the query; None for ``metadata=null``."""
    pairs = ((_METADATA.fullmatch(name), value) for name, value in request.query_params.items())
    wanted = {match[1]: value for match, value in pairs if match}
    problem = None
    if len(wanted) > MAX_METADATA:
        problem = f"jobs have at most {MAX_METADATA} pairs, got {len(wanted)}"
    elif "metadata" in request.query_params:
        if request.query_params.getlist("metadata") == ["null"] and not wanted:
            return None
        problem = "expected pairs, as metadata[KEY]=VALUE, or metadata=null alone, which is for jobs without metadata"
    if problem is not None:
        raise InvalidInputError(f"Invalid 'metadata': {problem}.", code="invalid_value", param="metadata")
    return wanted
