"""A worker that a killed server has left, and the one that comes after it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cotenant.core.errors import ConflictError
from cotenant.runtime import worker_lock

HOLD = """
import sys
from pathlib import Path
from cotenant.runtime.worker_lock import lock_worker
lock_worker(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_worker_that_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_lock, "_WAIT_S", 0.0)
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(ConflictError, match=f"process {other.pid}, has not ended") as caught:
            worker_lock.lock_worker(tmp_path)
        assert str(tmp_path) in caught.value.message
        other.kill()
    worker_lock.lock_worker(tmp_path)


def test_where_nothing_can_be_locked_a_worker_starts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "WORKER").mkdir()
    worker_lock.lock_worker(tmp_path)
    assert "WORKER cannot be locked" in caplog.text
