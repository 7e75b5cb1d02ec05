"""What a start takes is printed, and why a server did not start."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "bench" / "start_up.py"


def start_up(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "tiny", "--starts", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_start_is_timed_until_its_first_token() -> None:
    result = start_up("--policy", "inference-only", "--max-model-len", "64", "--show-log")
    found = re.search(r"^start 1: healthy after ([\d.]+) s, first token after ([\d.]+) s$", result.stdout, re.MULTILINE)
    assert found, result
    assert 0.5 < float(found[1]) <= float(found[2])
    assert "the worker is ready" in result.stdout


def test_what_is_chosen_here_is_not_taken() -> None:
    result = start_up("--port=8000")
    assert result.returncode == 2
    assert "--port is chosen here" in result.stderr


def test_a_server_that_does_not_start_says_why() -> None:
    result = start_up("--max-model-len", "3")
    assert result.returncode == 1
    assert "the server ended with code 2" in result.stderr
    assert "--max-model-len: must be at least 16" in result.stderr
