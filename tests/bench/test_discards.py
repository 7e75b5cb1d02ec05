"""The script that says what discards change in an adapter."""

from __future__ import annotations

from pathlib import Path

from forked import run_script

SCRIPT = Path(__file__).parent.parent.parent / "bench" / "discards.py"


def test_on_a_cpu_discards_change_no_bit() -> None:
    small = ("--steps", "4", "--discards", "9", "--seq-len", "32", "--tokens-per-step", "64", "--tasklet-tokens", "32")
    run = run_script(SCRIPT, "tiny", "--device", "cpu", *small)
    assert run.returncode == 0, run.stderr
    printed = run.stdout
    assert "discards: 4 steps, 9 discards" in printed
    assert "run to run 0.000%, with 9 discards: 0.000% from the first run, 0.000% from the second" in printed
