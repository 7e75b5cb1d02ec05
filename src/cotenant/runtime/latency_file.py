"""The latencies that were measured, kept in the data folder from one start of a server to the next."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cotenant.durable import write_atomically
from cotenant.predictor.predictor import LatencyPredictor

logger = logging.getLogger(__name__)

LATENCY_FOLDER = "latencies"  # in the data folder
_MOST_BYTES = 1 << 30  # thousands of times what is saved
_PART_RECORDS = 128  # encoded at a time, between two batches


class LatencyFile:
    """One file for each pair of hardware and model. That it cannot be read or saved is told in the log: what it holds
    can be measured again."""

    def __init__(self, data_dir: Path, hardware: str, model: str) -> None:
        name = hashlib.sha256(f"{hardware}/{model}".encode()).hexdigest()[:16]
        self.path = data_dir / LATENCY_FOLDER / f"{name}.json"
        self._parts: Iterator[bytes] | None = None  # that are still to be encoded
        self._encoded: list[bytes] = []
        self._writer: threading.Thread | None = None

    def load(self, predictor: LatencyPredictor) -> int:
        """Take over what is there: how many records."""
        try:
            exported = self._read()
        except FileNotFoundError:
            return 0
        except OSError as error:
            logger.warning("measured latencies cannot be read: %s", error)
            return 0
        try:
            return predictor.restore(exported)
        except ValueError as error:
            logger.warning("measured latencies in %s are passed over: %s", self.path, error)
            return 0

    def _read(self) -> bytes:
        """Raises OSError, also for what is no file of ours: to read a pipe would be to wait for ever."""
        with open(self.path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
                raise OSError(errno.EINVAL, "no file that was saved here", str(self.path))
            return file.read()

    def save(self, predictor: LatencyPredictor) -> None:
        with _telling():
            self.write(predictor)

    def write(self, predictor: LatencyPredictor) -> None:
        """As ``save``, but raises OSError."""
        self.wait()
        self._parts = None
        self._write(predictor.export())

    def save_part(self, predictor: LatencyPredictor) -> bool:
        """A small part of what ``save`` does, for who has no time: encode some records; once that was the last of them,
        have a thread write the file, unless one still does, and return True."""
        if self._parts is None:
            self._parts, self._encoded = predictor.export_parts(_PART_RECORDS), []
        part = next(self._parts, None)
        if part is not None:
            self._encoded.append(part)
            return False
        self._parts, encoded = None, self._encoded
        if self._writer is not None and self._writer.is_alive():  # the disk is slow, or hangs
            return True
        self._writer = threading.Thread(target=self._write_beside, args=(encoded,), name="latencies", daemon=True)
        self._writer.start()
        return True

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _write_beside(self, encoded: list[bytes]) -> None:
        with _telling():
            self._write(b"".join(encoded))

    def _write(self, exported: bytes) -> None:
        def write(path: Path) -> None:
            path.write_bytes(exported)

        write_atomically(self.path, write)


@contextmanager
def _telling() -> Iterator[None]:
    """The log gets what keeps the file from being written."""
    try:
        yield
    except OSError as error:
        logger.warning("measured latencies cannot be kept: %s", error)
