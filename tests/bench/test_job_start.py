"""The script that says what the start of a job does to requests."""

from __future__ import annotations

import re
from pathlib import Path

from forked import run_script

SCRIPT = Path(__file__).parent.parent.parent / "bench" / "job_start.py"
SMALL = ("--device", "cpu", "--seq-len", "64", "--min-len", "16", "--tokens-per-step", "128", "--sequences", "2")
ROOM = ("--slo-tpot-ms", "300", "--seconds", "1")  # enough for training on a machine with much to do


def test_gaps_between_tokens_with_and_without_a_job() -> None:
    run = run_script(SCRIPT, "tiny", *SMALL, *ROOM, "--jobs", "1", "--stacks", "1", "--adapters", "2")
    assert run.returncode == 0, run.stderr
    title, *lines = run.stdout.splitlines()
    assert title.startswith("tiny on cpu")
    phases = [line.partition(":")[0] for line in lines if "ms between two tokens" in line]
    assert phases == ["without a job", "adapters are read", "job 1 begins", "job 1 goes on", "job 1 ends"]
    (launches,) = [line for line in lines if "longest launches" in line and "start" in line]
    assert "forward" in launches or "backward" in launches
    assert any(" < " in line and " x " in line for line in lines)
    (trained,) = re.findall(r"(\d+) tokens trained", run.stdout)
    assert int(trained) > 0
