"""A worker that is started before it is known what for."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import psutil
import pytest

from cotenant.api.prepared import PreparedWorker

# Writes the arguments that it is given to the file that they name first, and ends with the code that they name second.
SCRIPT = """
import json, pathlib, sys
assert sys.argv[1:] == ["--wait"]
line = sys.stdin.readline()
if not line:
    sys.exit(0)
path, code, *_ = json.loads(line)
pathlib.Path(path).write_text(line)
sys.exit(int(code))
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "worker.py").write_text(SCRIPT)
    return [sys.executable, str(tmp_path / "worker.py")]


def test_it_gets_its_command_line_when_that_is_known(command: list[str], tmp_path: Path) -> None:
    with PreparedWorker(command) as prepared:
        assert prepared.begin([str(tmp_path / "seen"), "3", "a 'word'\n"])
        assert asyncio.run(prepared.wait()) == 3
    assert "a 'word'\\n" in (tmp_path / "seen").read_text()


def test_what_was_not_begun_is_gone_at_the_end(command: list[str]) -> None:
    with PreparedWorker(command) as prepared:
        pid = prepared.pid
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


def test_one_that_has_died_is_not_begun(command: list[str], tmp_path: Path) -> None:
    with PreparedWorker(command) as prepared:
        prepared.kill()
        assert asyncio.run(prepared.wait()) == -9
        assert not prepared.begin([str(tmp_path / "seen"), "0"])


def test_it_ends_where_nobody_is_left_to_begin_it() -> None:
    """The real one, whose API process was killed."""
    with PreparedWorker() as prepared:
        assert prepared._process.stdin is not None
        prepared._process.stdin.close()
        assert asyncio.run(prepared.wait()) == 0
