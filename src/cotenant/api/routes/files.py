"""``/v1/files``: uploads, and what the server has written for the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any, BinaryIO, Literal
from urllib.parse import quote

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from cotenant.api.multipart import read_upload
from cotenant.api.openapi import answers
from cotenant.api.responses import json_response
from cotenant.api.state import state_of
from cotenant.core.errors import InvalidInputError
from cotenant.store import FileRecord

router = APIRouter(tags=["files"])

PURPOSES = ("fine-tune", "batch", "assistants", "vision", "user_data", "evals")
MAX_FILES_LISTED = 10_000
_READ_BYTES = 256 * 1024


class FileObject(msgspec.Struct, kw_only=True):
    """A stored file. ``bytes``: its size."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str = "processed"
    expires_at: int | None = None
    status_details: str | None = None


class FileList(msgspec.Struct, kw_only=True):
    """A page of files."""

    object: str = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct, kw_only=True):
    """A file that is gone."""

    id: str
    object: str = "file"
    deleted: bool = True


DOCUMENTED = (FileObject, FileList, FileDeleted)

_UPLOAD_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": list(PURPOSES)},
                    },
                    "additionalProperties": False,
                }
            }
        },
    }
}
_CONTENT: dict[int | str, dict[str, Any]] = {
    200: {"description": "The content.", "content": {"application/octet-stream": {}}}
}

_IN_USE: dict[int | str, dict[str, Any]] = {
    409: answers(None, 404)[404] | {"description": "A job that has not ended uses the file."}
}


@router.post("/v1/files", openapi_extra=_UPLOAD_BODY, responses=answers(FileObject, 400, 401, 413, 500))
async def upload_file(request: Request) -> Response:
    """Store a file. It is written to disk while it arrives."""
    state = state_of(request)
    upload = await asyncio.to_thread(state.store.files.begin_upload, state.config.api.max_upload_bytes)
    try:
        form = await read_upload(request, upload, _check_field)
        for name, value in (("file", form.filename), ("purpose", form.fields.get("purpose"))):
            if value is None:
                raise InvalidInputError(
                    f"Missing required parameter: '{name}'.", code="missing_required_parameter", param=name
                )
        record = await asyncio.to_thread(upload.finish, form.filename or "file", form.fields["purpose"])
    finally:
        await asyncio.to_thread(upload.discard)
    return json_response(_object_of(record))


@router.get("/v1/files", responses=answers(FileList, 400, 401))
async def list_files(
    request: Request,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_FILES_LISTED)] = MAX_FILES_LISTED,
    order: Literal["asc", "desc"] = "desc",
    purpose: str | None = None,
) -> Response:
    """The files, newest first unless ``order`` is asc."""
    page = await asyncio.to_thread(
        state_of(request).store.files.page, after=after, limit=limit, ascending=order == "asc", purpose=purpose
    )
    files = [_object_of(record) for record in page.items]
    first, last = (files[0].id, files[-1].id) if files else (None, None)
    return json_response(FileList(data=files, first_id=first, last_id=last, has_more=page.has_more))


@router.get("/v1/files/{file_id}", responses=answers(FileObject, 401, 404))
async def retrieve_file(request: Request, file_id: str) -> Response:
    """One file's description."""
    return json_response(_object_of(await asyncio.to_thread(state_of(request).store.files.get, file_id)))


@router.get("/v1/files/{file_id}/content", responses=answers(None, 401, 404) | _CONTENT)
async def file_content(request: Request, file_id: str) -> Response:
    """One file's content."""
    record, content = await asyncio.to_thread(state_of(request).store.files.open, file_id)
    headers = {
        "Content-Length": str(record.size_bytes),
        "Content-Disposition": f"attachment; filename*=utf-8''{quote(record.filename, safe='')}",
    }
    return StreamingResponse(_pieces(content), media_type="application/octet-stream", headers=headers)


@router.delete("/v1/files/{file_id}", responses=answers(FileDeleted, 401, 404) | _IN_USE)
async def delete_file(request: Request, file_id: str) -> Response:
    """Delete a file that no unfinished job uses."""
    await asyncio.to_thread(state_of(request).store.files.delete, file_id)
    return json_response(FileDeleted(id=file_id))


def _check_field(name: str, value: str) -> None:
    if name != "purpose":
        raise InvalidInputError(
            f"Unrecognized request argument supplied: {name[:100]}.", code="unknown_parameter", param=name[:100]
        )
    if value not in PURPOSES:
        raise InvalidInputError(
            f"Invalid 'purpose': expected one of {', '.join(PURPOSES)}, got '{value[:50]}'.",
            code="invalid_value",
            param="purpose",
        )


async def _pieces(content: BinaryIO) -> AsyncIterator[bytes]:
    try:
        while piece := await asyncio.to_thread(content.read, _READ_BYTES):
            yield piece
    finally:
        content.close()


def _object_of(record: FileRecord) -> FileObject:
    return FileObject(
        id=record.id,
        bytes=record.size_bytes,
        created_at=record.created_at,
        filename=record.filename,
        purpose=record.purpose,
    )
