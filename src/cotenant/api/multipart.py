"""A form with a file in it, read as it arrives: the file goes to disk in pieces and never lies in memory as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from cotenant.core.errors import InvalidInputError
from cotenant.store.files import Upload

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

WRITE_BYTES = 1024 * 1024
MAX_FIELD_BYTES = 1024
MAX_FILENAME = 255
_PARSED_AT_ONCE = 65536


@dataclass
class UploadForm:
    """What the form held. ``filename`` None: no file was in it."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


@dataclass(slots=True)
class _Part:
    """One part of the form; ``is_file`` once its headers have been read."""

    name: str = ""
    is_file: bool = False
    value: bytearray = field(default_factory=bytearray)


async def read_upload(
    request: Request, upload: Upload, check_field: Callable[[str, str], None], file_field: str = "file"
) -> UploadForm:
    """Read a whole multipart body and write its one file into ``upload``.

    ``check_field`` is called with each other field as soon as it is known, and may refuse it. Raises InvalidInputError
    for a body that is no such form, and what ``upload.write`` raises.
    """
    reader = _FormReader(upload, check_field, file_field)
    parser = _parser_for(request, reader)
    try:
        async for chunk in request.stream():
            for start in range(0, len(chunk), _PARSED_AT_ONCE):
                parser.write(chunk[start : start + _PARSED_AT_ONCE])
                if len(reader.content) >= WRITE_BYTES:
                    await reader.write_content()
                await asyncio.sleep(0)  # what is all boundaries takes its time
        parser.finalize()
    except FormParserError as error:
        raise _malformed(str(error)) from None
    if not reader.complete:
        raise _malformed("it ends before its last boundary")
    await reader.write_content()
    return reader.form


def _parser_for(request: Request, reader: _FormReader) -> MultipartParser:
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise _malformed("the Content-Type must be multipart/form-data with a boundary")
    try:
        return MultipartParser(boundary, reader.callbacks())
    except FormParserError as error:
        raise _malformed(str(error)) from None


class _FormReader:
    """Takes what the parser finds. ``content`` is what of the file was read and is not written yet."""

    def __init__(self, upload: Upload, check_field: Callable[[str, str], None], file_field: str) -> None:
        self.form = UploadForm()
        self.content = bytearray()
        self.complete = False
        self._upload = upload
        self._check_field = check_field
        self._file_field = file_field
        self._part = _Part()
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._disposition = b""

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._on_part_begin,
            "on_header_field": lambda data, start, end: self._header_name.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header_value.extend(data[start:end]),
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": self._on_part_data,
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }

    async def write_content(self) -> None:
        """Write what has come of the file. Not on the event loop: a disk may take its time."""
        content, self.content = self.content, bytearray()
        if content:
            await asyncio.to_thread(self._upload.write, memoryview(content))

    def _on_part_begin(self) -> None:
        self._part = _Part()
        self._disposition = b""

    def _on_header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._part.name = options.get(b"name", b"").decode(errors="replace")
        self._part.is_file = b"filename" in options
        if self._part.is_file != (self._part.name == self._file_field):
            raise InvalidInputError(
                f"Invalid '{self._file_field}': expected one file with a name in the field '{self._file_field}' "
                "and none elsewhere.",
                code="invalid_value",
                param=self._file_field,
            )
        if self._part.is_file:
            if self.form.filename is not None:
                raise InvalidInputError("Only one file can be uploaded at a time.", param=self._file_field)
            self.form.filename = _clean(options[b"filename"].decode(errors="replace"))

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._part.is_file:
            self.content += data[start:end]
            return
        self._part.value += data[start:end]
        if len(self._part.value) > MAX_FIELD_BYTES:
            raise InvalidInputError(
                f"Invalid '{self._part.name[:100]}': the value is too long.",
                code="invalid_value",
                param=self._part.name[:100],
            )

    def _on_part_end(self) -> None:
        if not self._part.is_file:
            value = self._part.value.decode(errors="replace")
            if self._part.name in self.form.fields:
                raise InvalidInputError(f"'{self._part.name[:100]}' is there twice.", param=self._part.name[:100])
            self._check_field(self._part.name, value)
            self.form.fields[self._part.name] = value

    def _on_end(self) -> None:
        self.complete = True


def _clean(filename: str) -> str:
    """A client's file name as text to show: it is used for nothing else."""
    return "".join(character for character in filename if character.isprintable())[:MAX_FILENAME]


def _malformed(reason: str) -> InvalidInputError:
    return InvalidInputError(
        f"The request body is not a form with a file: {reason}.", code="invalid_multipart", param="file"
    )
