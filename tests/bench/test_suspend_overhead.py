"""bench/suspend_overhead.py on the built-in model."""

from __future__ import annotations

import re
from pathlib import Path

from forked import run_script

SCRIPT = Path(__file__).parents[2] / "bench" / "suspend_overhead.py"


def test_steps_that_are_cut_stand_beside_whole_ones() -> None:
    run = run_script(SCRIPT, "--pairs", "1", "--steps", "1")
    assert run.returncode == 0, run.stderr
    assert re.search(r"^pair  1: cut +[\d.]+ ms/step, uncut +[\d.]+ ms/step, overhead", run.stdout, re.MULTILINE)
    assert "tiny: median overhead" in run.stdout
