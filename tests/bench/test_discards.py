"""The script that says what discards change in an adapter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent.parent / "bench" / "discards.py"


def test_on_a_cpu_discards_change_no_bit() -> None:
    small = ("--steps", "4", "--discards", "9", "--seq-len", "32", "--tokens-per-step", "64", "--tasklet-tokens", "32")
    command = [sys.executable, str(SCRIPT), "tiny", "--device", "cpu", *small]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    assert "discards: 4 steps, 9 discards" in printed
    assert "run to run 0.000%, with 9 discards: 0.000% from the first run, 0.000% from the second" in printed
