"""Files, jobs, events and checkpoints: rows in SQLite, content on disk. Written by the API process alone.

Calls are synchronous and may come from any thread (``asyncio.to_thread``). What a call has returned from is on disk.
"""

from cotenant.store.errors import StoreError
from cotenant.store.lock import lock_folder
from cotenant.store.records import (
    CheckpointRecord,
    EventRecord,
    FileRecord,
    JobError,
    JobRecord,
    JobStatus,
    NewEvent,
    NewJob,
    Page,
    Pending,
    ServedAdapter,
)
from cotenant.store.store import Store, open_store

__all__ = [
    "CheckpointRecord",
    "EventRecord",
    "FileRecord",
    "JobError",
    "JobRecord",
    "JobStatus",
    "NewEvent",
    "NewJob",
    "Page",
    "Pending",
    "ServedAdapter",
    "Store",
    "StoreError",
    "lock_folder",
    "open_store",
]
