"""``/v1/models``: the base model, adapters, and what jobs have trained, checkpoints included."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from cotenant.api.models import ModelCard, ModelList
from cotenant.api.openapi import answers
from cotenant.api.responses import json_response
from cotenant.api.state import state_of

router = APIRouter(prefix="", tags=["models"])


class ModelDeleted(msgspec.Struct, kw_only=True):
    """A model that is gone."""

    id: str
    object: str = "model"
    deleted: bool = True


DOCUMENTED = (ModelDeleted,)


@router.get("/v1/models", responses=answers(ModelList, 401))
async def list_models(request: Request) -> Response:
    """Every model that a request may name."""
    return json_response(ModelList(await state_of(request).models.cards()))


@router.get("/v1/models/{model_id:path}", responses=answers(ModelCard, 401, 404))
async def retrieve_model(request: Request, model_id: str) -> Response:
    """One model. Its id may contain slashes and colons."""
    return json_response(await state_of(request).models.card(model_id))


@router.delete("/v1/models/{model_id:path}", responses=answers(ModelDeleted, 400, 401, 404, 409, 500))
async def delete_model(request: Request, model_id: str) -> Response:
    """Delete what a job has made, its result or a checkpoint, with its files. Requests that run on it end as they would
    have."""
    state = state_of(request)
    state.models.check_deletable(model_id)
    await state.jobs.delete_model(model_id)
    return json_response(ModelDeleted(id=model_id))
