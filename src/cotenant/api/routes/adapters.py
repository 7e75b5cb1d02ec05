"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``: adapters that come and go while the server runs."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from cotenant.api.openapi import answers, body_of
from cotenant.api.schemas.adapters import LoadLoraAdapterRequest, UnloadLoraAdapterRequest
from cotenant.api.schemas.parsing import convert, read_object
from cotenant.api.state import state_of

router = APIRouter(tags=["adapters"])

DOCUMENTED = (LoadLoraAdapterRequest, UnloadLoraAdapterRequest)

_TEXT: dict[int | str, dict[str, Any]] = {
    200: {"description": "Success.", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


@router.post(
    "/v1/load_lora_adapter",
    response_class=PlainTextResponse,
    openapi_extra=body_of(LoadLoraAdapterRequest),
    responses=answers(None, 400, 401, 404, 413, 503) | _TEXT,
)
async def load_lora_adapter(request: Request) -> Response:
    """Serve an adapter from a folder on the server's disk, until it is unloaded or the server ends."""
    body = convert(await read_object(request), LoadLoraAdapterRequest)
    body.check()
    await state_of(request).models.load_adapter(body.lora_name, body.lora_path, body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post(
    "/v1/unload_lora_adapter",
    response_class=PlainTextResponse,
    openapi_extra=body_of(UnloadLoraAdapterRequest),
    responses=answers(None, 400, 401, 404, 413) | _TEXT,
)
async def unload_lora_adapter(request: Request) -> Response:
    """Serve an adapter no more. Requests that run on it end as they would have."""
    body = convert(await read_object(request), UnloadLoraAdapterRequest)
    await state_of(request).models.unload_adapter(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
