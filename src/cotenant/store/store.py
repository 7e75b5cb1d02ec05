"""The store of one data folder, put together."""

from __future__ import annotations

import logging
from pathlib import Path

from cotenant.durable import leave_room, remove_leftovers, remove_leftovers_in
from cotenant.store.adapters import AdapterCatalog
from cotenant.store.ballast import Ballast
from cotenant.store.database import Database
from cotenant.store.errors import store_error
from cotenant.store.events import EventStore
from cotenant.store.files import FILES_FOLDER, FileStore
from cotenant.store.ids import is_id
from cotenant.store.jobs import JOB_ID_PREFIX, JOBS_FOLDER, JobStore
from cotenant.store.lock import FolderLock, lock_folder
from cotenant.store.paths import make_usable
from cotenant.store.records import ServedAdapter

logger = logging.getLogger(__name__)

DATABASE_NAME = "cotenant.db"


class Store:
    """Everything that outlives the server. ``folder`` is absolute and locked until ``close``."""

    def __init__(self, folder: Path, lock: FolderLock, database: Database, ballast: Ballast) -> None:
        self.folder = folder
        self._lock = lock
        self._database = database
        self.files = FileStore(folder, database, ballast)
        self.jobs = JobStore(folder, database)
        self.events = EventStore(folder, database)
        self._adapters = AdapterCatalog(folder, database)

    def served_adapters(self) -> list[ServedAdapter]:
        """All adapters that requests may name where their base model is served, and adapters of their rank are."""
        return self._adapters.all()

    def find_adapter(self, name: str) -> ServedAdapter | None:
        """The one that is served under ``name``."""
        return self._adapters.find(name)

    def is_promised(self, name: str) -> bool:
        """Whether a job that has not ended, or may be resumed, may have this name for its result or a checkpoint."""
        return self._adapters.is_promised(name)

    def owner(self, name: str) -> str | None:
        """The job one of whose models is served under this name, or may come to be; None: there is none."""
        return self._adapters.owner(name)

    def check_room(self) -> None:
        """Raises StoreError if the disk has no room beside what is left to the database."""
        try:
            leave_room(self.folder)
        except OSError as error:
            raise store_error(error) from error

    def close(self) -> None:
        """Close the database and let another server use the folder."""
        self._database.close()
        self._lock.release()


def open_store(folder: Path) -> Store:
    """Lock a data folder (made if it isn't there), remove what a crash left half-written, and open its database.

    Raises ConflictError if another process uses the folder or a newer version wrote it, InvalidInputError if it cannot
    be used at all, StoreError if the disk is full.
    """
    folder = folder.absolute()
    lock = lock_folder(folder, "a server")
    try:
        for name in (FILES_FOLDER, JOBS_FOLDER):
            make_usable(folder / name)
        _remove_leftovers(folder)
        ballast = Ballast(folder)
        database = Database(folder / DATABASE_NAME, ballast)
    except BaseException:
        lock.release()
        raise
    try:
        ballast.restore()
        return Store(folder, lock, database, ballast)
    except BaseException:
        database.close()
        lock.release()
        raise


def _remove_leftovers(folder: Path) -> None:
    """What a crash left half-written: the data folder, and those in it, may have been there before, with files of
    others. Jobs' folders are ours."""
    for shared in (folder, folder / FILES_FOLDER, folder / JOBS_FOLDER):
        remove_leftovers_in(shared)
    for job in (folder / JOBS_FOLDER).iterdir():
        if is_id(job.name, JOB_ID_PREFIX):
            remove_leftovers(job)
