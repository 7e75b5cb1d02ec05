"""SQLite under SQLAlchemy: many readers, one writer, and a commit that is on disk when it returns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from sqlalchemy import URL, Connection, create_engine, event, insert, inspect, select, update
from sqlalchemy.exc import DBAPIError, IntegrityError

from cotenant.core.errors import ConflictError, InvalidInputError
from cotenant.store import schema
from cotenant.store.ballast import Ballast
from cotenant.store.errors import may_be_full, store_error

T = TypeVar("T")

BUSY_TIMEOUT_MS = 10_000

_PRAGMAS = ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON", f"busy_timeout = {BUSY_TIMEOUT_MS}")


class Database:
    """Runs units of work, each in one transaction, from any thread. A unit returns plain values, never open cursors.

    Raises StoreError where the disk or the database file fails; then nothing of the unit has happened.
    """

    def __init__(self, path: Path, ballast: Ballast) -> None:
        """Opens or creates the file, or brings it up to date. Raises ConflictError if a newer version of this program
        wrote it, InvalidInputError if it does not say which one did."""
        self._ballast = ballast
        # Writers wait for each other here and not in SQLite, which would let them fail after a timeout.
        self._writing = threading.Lock()
        self._engine = create_engine(URL.create("sqlite", database=str(path)), pool_size=8, max_overflow=64)
        event.listen(self._engine, "connect", _on_connect)
        event.listen(self._engine, "begin", _on_begin)
        try:
            self.write(lambda connection: _prepare(connection, path))
        except BaseException:
            self.close()
            raise

    def read(self, work: Callable[[Connection], T]) -> T:
        """Run ``work`` on one consistent view of the data."""
        try:
            with self._engine.connect() as connection:
                return work(connection)
        except DBAPIError as error:
            raise store_error(error) from error

    def write(self, work: Callable[[Connection], T]) -> T:
        """Run ``work`` and commit it. It is run again if the disk may be full and the ballast could be dropped."""
        try:
            return self._write_once(work)
        except IntegrityError:
            raise  # a constraint of ours; those that a caller can break are caught where they are
        except DBAPIError as error:
            if not (may_be_full(error) and self._ballast.release()):
                raise store_error(error) from error
        try:
            return self._write_once(work)
        except DBAPIError as error:
            raise store_error(error) from error

    def close(self) -> None:
        self._engine.dispose()

    def _write_once(self, work: Callable[[Connection], T]) -> T:
        with self._writing, self._engine.begin() as connection:
            return work(connection)


def _on_connect(connection: Any, _: object) -> None:
    connection.isolation_level = None  # transactions are ours to begin, so that reads have one too
    connection.create_function("has_pair", 3, _has_pair, deterministic=True)
    for pragma in _PRAGMAS:
        connection.execute(f"PRAGMA {pragma}")


def _has_pair(pairs: str | None, key: str, value: str) -> bool:
    """``has_pair`` in SQL: whether a JSON object has this pair. SQLite's own functions read texts up to a NUL."""
    return pairs is not None and msgspec.json.decode(pairs).get(key) == value


def _on_begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")


def _prepare(connection: Connection, path: Path) -> None:
    if not inspect(connection).has_table(schema.schema_version.name):
        schema.metadata.create_all(connection)
        connection.execute(insert(schema.schema_version).values(version=schema.SCHEMA_VERSION))
        return
    version = _version(connection, path)
    if version > schema.SCHEMA_VERSION:
        raise ConflictError(
            f"{path} was written by a newer version of cotenant (schema {version}; this one knows up to "
            f"{schema.SCHEMA_VERSION}). Install that version, or choose another folder with --data-dir.",
            code="schema_too_new",
            param="data-dir",
        )
    for newer in range(version + 1, schema.SCHEMA_VERSION + 1):
        for statement in schema.MIGRATIONS[newer]:
            connection.exec_driver_sql(statement)
        connection.execute(update(schema.schema_version).values(version=newer))


def _version(connection: Connection, path: Path) -> int:
    """The version of the schema that the file has. Raises InvalidInputError if it does not say."""
    versions = connection.execute(select(schema.schema_version.c.version)).scalars().all()
    if len(versions) != 1 or not isinstance(versions[0], int) or versions[0] < 1:
        said = ", ".join(repr(version) for version in versions[:2]) or "nothing"
        raise InvalidInputError(
            f"{path} is damaged: its table schema_version holds {said[:60]} in place of one version. Put a copy of the "
            "data folder in its place, or choose another folder with --data-dir.",
            code="bad_data_dir",
            param="data-dir",
        )
    return int(versions[0])
