"""The folder where a worker finds its configuration and the socket of the API process, until it has connected."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

# The kernel allows 107 bytes for the path of a Unix socket; what we append to the folder's name needs 16.
_MAX_FOLDER_BYTES = 90
_PREFIX = "cotenant-worker-"
_CONFIG, _SOCKET = "config.json", "worker.sock"


class WorkerFolder:
    """A new folder that only this user can enter, with a path short enough for a Unix socket in it.

    The configuration's file is locked as long as the folder is in use, by this process alone: whoever makes such a
    folder next removes those of processes that were killed.
    """

    def __init__(self, config_json: bytes) -> None:
        parent = _parent()
        _remove_abandoned(parent)
        while (made := _make(parent)) is None:
            pass
        self._path, descriptor = made
        self._config = os.fdopen(descriptor, "wb")
        try:
            self._config.write(config_json)
            self._config.flush()
        except BaseException:
            self.remove()
            raise

    @property
    def config_path(self) -> Path:
        return self._path / _CONFIG

    @property
    def address(self) -> str:
        """For ZeroMQ."""
        return f"ipc://{self._path}/{_SOCKET}"

    def remove(self) -> None:
        """May be called again."""
        shutil.rmtree(self._path, ignore_errors=True)
        with contextlib.suppress(OSError):  # a full disk, once more
            self._config.close()


def _parent() -> Path:
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > _MAX_FOLDER_BYTES - len(f"/{_PREFIX}12345678"):
        folder = "/tmp"
    return Path(folder)


def _make(parent: Path) -> tuple[Path, int] | None:
    """The folder, and its configuration's file, locked. None if another process has taken it for an abandoned one."""
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        descriptor = os.open(path / _CONFIG, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        _lock(descriptor)
        if os.fstat(descriptor).st_nlink > 0:
            return path, descriptor
    except BlockingIOError:
        pass
    except OSError:  # no locks here, so nobody gets one to remove it
        return path, descriptor
    os.close(descriptor)
    return None


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user, in use, or removed by another process
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(folder).st_uid == os.geteuid():
                    _empty(folder)
                    os.rmdir(path)
            finally:
                os.close(folder)


def _empty(folder: int) -> None:
    """Remove a configuration that nobody has locked, and the socket beside it; nothing else. Raises OSError."""
    try:
        descriptor = os.open(_CONFIG, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return
    try:
        _lock(descriptor)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_SOCKET, dir_fd=folder)
        os.unlink(_CONFIG, dir_fd=folder)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
