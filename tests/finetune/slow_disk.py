"""A disk that tests hold up."""

from __future__ import annotations

import errno
import threading
from typing import Any

import pytest

from cotenant.finetune import checkpoint
from cotenant.finetune.export import write_adapter_files


class SlowDisk:
    """Checkpoints are written when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._may_write = threading.Semaphore(0)
        self._write = write_adapter_files
        self.is_full = False
        monkeypatch.setattr(checkpoint, "write_adapter_files", self._wait_and_write)

    def let_through(self, num_checkpoints: int = 1000) -> None:
        self._may_write.release(num_checkpoints)

    def _wait_and_write(self, *arguments: Any) -> None:
        assert self._may_write.acquire(timeout=60), "the test has forgotten the disk"
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._write(*arguments)
