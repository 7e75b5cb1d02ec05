"""Files: content in ``files/<id>``, a row each. The row is committed once the content is on disk, and goes first."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO

from sqlalchemy import Connection, Row, delete, insert, or_, select

from cotenant.core.errors import ConflictError, InvalidInputError, NotFoundError
from cotenant.durable import TEMPORARY_PREFIX, fsync_path, leave_room
from cotenant.store import schema
from cotenant.store.ballast import Ballast
from cotenant.store.database import Database
from cotenant.store.errors import store_error
from cotenant.store.ids import is_id, new_id
from cotenant.store.paging import DeletedPlaces, read_page
from cotenant.store.records import UNFINISHED, FileRecord, Page

logger = logging.getLogger(__name__)

FILES_FOLDER = "files"
_ID_PREFIX = "file-"
_FILE_MODE = 0o600  # training data is the operator's own


class FileTooLargeError(InvalidInputError):
    """A file is larger than the limit (HTTP 413)."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"The file is larger than {limit_bytes} bytes, the most that this server takes.",
            code="file_too_large",
            param="file",
        )


class Upload:
    """A file on its way in: ``write`` its content, then ``finish`` or ``discard``. One thread at a time.

    Until ``finish`` it is a temporary file, which a crash leaves for the next start to remove. ``leaves_room``: the
    disk is full to it where it would take what the database needs.
    """

    def __init__(self, store: FileStore, folder: Path, limit_bytes: int, *, leaves_room: bool = True) -> None:
        self._store = store
        self._leaves_room = leaves_room
        self._folder = folder
        self._limit_bytes = limit_bytes
        self.size_bytes = 0
        try:
            descriptor, name = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=folder)
        except OSError as error:
            raise store_error(error) from error
        self._temporary = Path(name)
        self._file: BinaryIO = os.fdopen(descriptor, "wb", buffering=0)

    def write(self, content: bytes | memoryview) -> None:
        """Append. Raises FileTooLargeError past the limit, StoreError if the disk is full."""
        self.size_bytes += len(content)
        if self.size_bytes > self._limit_bytes:
            raise FileTooLargeError(self._limit_bytes)
        rest = memoryview(content)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            if self._leaves_room:
                leave_room(self._temporary)
        except OSError as error:
            raise store_error(error) from error

    def finish(self, filename: str, purpose: str) -> FileRecord:
        """Make the content durable under a new id and commit its row."""
        file_id = self.place()
        record = FileRecord(file_id, int(time.time()), filename, purpose, self.size_bytes)
        try:
            self._store.insert(record)
        except BaseException:
            self._store.remove_content(file_id)
            raise
        self._store.restore_ballast()
        return record

    def place(self) -> str:
        """Make the content durable under a new id, which is returned. Without a row the next start removes it."""
        file_id = new_id(_ID_PREFIX)
        target = self._folder / file_id
        try:
            os.fchmod(self._file.fileno(), _FILE_MODE)
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._temporary, target)
            fsync_path(self._folder)
        except OSError as error:
            self._store.remove_content(file_id)
            raise store_error(error) from error
        return file_id

    def discard(self) -> None:
        """Leave nothing behind. Does nothing after ``finish``."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


class FileStore:
    """The files of a data folder."""

    def __init__(self, folder: Path, database: Database, ballast: Ballast) -> None:
        """Removes content of ``folder/files`` that has no row: of an upload or a deletion cut short.

        What others keep there (any folder may be named as the data folder) is left alone.
        """
        self._folder = folder / FILES_FOLDER
        self._database = database
        self._ballast = ballast
        self._deleted = DeletedPlaces()
        known = set(database.read(lambda connection: connection.execute(select(schema.files.c.id)).scalars().all()))
        for path in self._folder.iterdir():
            if is_id(path.name, _ID_PREFIX) and path.name not in known and path.is_file():
                path.unlink()

    def begin_upload(self, limit_bytes: int) -> Upload:
        """Start a file of at most ``limit_bytes``. Raises StoreError."""
        return Upload(self, self._folder, limit_bytes)

    def place(self, content: bytes) -> str:
        """Put ``content``, the server's own, on disk under a new id, for a row that the caller inserts. Raises
        StoreError."""
        upload = Upload(self, self._folder, len(content), leaves_room=False)
        try:
            upload.write(content)
            return upload.place()
        finally:
            upload.discard()

    def insert(self, record: FileRecord) -> None:
        """Commit the row of a file whose content is in place. Raises StoreError."""
        self._database.write(lambda connection: insert_file(connection, record))

    def restore_ballast(self) -> None:
        """The disk has room: if the ballast was used, set it aside again."""
        self._ballast.restore()

    def get(self, file_id: str) -> FileRecord:
        """Raises NotFoundError."""
        return self._database.read(lambda connection: get_file(connection, file_id))

    def page(
        self, *, after: str | None = None, limit: int = 10_000, ascending: bool = False, purpose: str | None = None
    ) -> Page[FileRecord]:
        """A page of files, newest first unless ``ascending``. Raises InvalidInputError for an unknown ``after``."""
        query = select(schema.files)
        if purpose is not None:
            query = query.where(schema.files.c.purpose == purpose)
        return self._database.read(
            lambda connection: read_page(
                connection,
                query,
                schema.files,
                _file_of,
                after=after,
                limit=limit,
                deleted=self._deleted.find,
                ascending=ascending,
            )
        )

    def open(self, file_id: str) -> tuple[FileRecord, BinaryIO]:
        """The file and its content, which stays readable even if the file is deleted. Raises NotFoundError."""
        record = self.get(file_id)
        try:
            return record, self.path(record.id).open("rb")
        except FileNotFoundError:
            raise _no_such_file(file_id) from None  # deleted since
        except OSError as error:
            raise store_error(error) from error

    def path(self, file_id: str) -> Path:
        """Where the content of a stored file is. ``file_id`` must be one of ours, never a client's words."""
        return self._folder / file_id

    def delete(self, file_id: str) -> None:
        """Raises NotFoundError, or ConflictError while a job that has not ended uses the file."""
        self._database.write(lambda connection: self._deleted.add(file_id, _delete_row(connection, file_id)))
        self.remove_content(file_id)
        self._ballast.restore()

    def remove_content(self, file_id: str) -> None:
        """Remove content that has no row (any more). If that fails, the next start does it."""
        with contextlib.suppress(OSError):
            (self._folder / file_id).unlink(missing_ok=True)


def insert_file(connection: Connection, record: FileRecord) -> None:
    """The row of a file, as part of a larger transaction."""
    connection.execute(
        insert(schema.files).values(
            id=record.id,
            created_at=record.created_at,
            filename=record.filename,
            purpose=record.purpose,
            size_bytes=record.size_bytes,
        )
    )


def get_file(connection: Connection, file_id: str) -> FileRecord:
    """Raises NotFoundError."""
    row = connection.execute(select(schema.files).where(schema.files.c.id == file_id)).one_or_none()
    if row is None:
        raise _no_such_file(file_id)
    return _file_of(row)


def _delete_row(connection: Connection, file_id: str) -> int:
    """Returns the row's sequence."""
    get_file(connection, file_id)
    jobs = schema.jobs.c
    user = connection.execute(
        select(jobs.id, jobs.status)
        .where(jobs.status.in_(UNFINISHED), or_(jobs.training_file == file_id, jobs.validation_file == file_id))
        .limit(1)
    ).one_or_none()
    if user is not None:
        raise ConflictError(
            f"File '{file_id}' is in use by fine-tuning job '{user.id}', which is {user.status}. "
            "Cancel the job or wait until it has ended.",
            code="file_in_use",
            param="file_id",
        )
    columns = schema.files.c
    gone = delete(schema.files).where(columns.id == file_id).returning(columns.sequence)
    return int(connection.execute(gone).scalar_one())


def _file_of(row: Row[Any]) -> FileRecord:
    return FileRecord(row.id, row.created_at, row.filename, row.purpose, row.size_bytes)


def missing_file(param: str, file_id: str) -> InvalidInputError:
    """What a request is told whose parameter ``param`` names a file that is not there."""
    return InvalidInputError(
        f"Invalid '{param}': there is no file '{file_id[:100]}'.", code="file_not_found", param=param
    )


def _no_such_file(file_id: str) -> NotFoundError:
    return NotFoundError(f"No such File object: {file_id[:100]}", code="file_not_found", param="file_id")
