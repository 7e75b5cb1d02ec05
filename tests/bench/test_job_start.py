"""The script that says what the start of a job does to requests."""

from __future__ import annotations

import re
from pathlib import Path

from forked import run_script
from undisturbed import until_undisturbed

SCRIPT = Path(__file__).parent.parent.parent / "bench" / "job_start.py"
SMALL = ("--device", "cpu", "--seq-len", "64", "--min-len", "16", "--tokens-per-step", "128", "--sequences", "2")
COUNTS = ("--slo-tpot-ms", "300", "--jobs", "1", "--stacks", "1", "--adapters", "2")


def test_gaps_between_tokens_with_and_without_a_job() -> None:
    def measured(attempt: int) -> str | None:
        """For longer where a machine with much to do did not come to a step's end. Sequences have so many tokens that
        they last for longer phases only where each token takes longer, too."""
        run = run_script(SCRIPT, "tiny", *SMALL, *COUNTS, "--seconds", str(1 + attempt / 2))
        if "the sequences ended before the last phase did" in run.stderr:
            return run.stderr.strip()
        assert run.returncode == 0, run.stderr
        title, *lines = run.stdout.splitlines()
        assert title.startswith("tiny on cpu")
        phases = [line.partition(":")[0] for line in lines if "ms between two tokens" in line]
        assert phases == ["without a job", "adapters are read", "job 1 begins", "job 1 goes on", "job 1 ends"]
        assert any(" < " in line and " x " in line for line in lines)
        (trained,) = re.findall(r"(\d+) tokens trained", run.stdout)
        started = [line for line in lines if "longest launches" in line and "start" in line]
        if not (int(trained) > 0 and started and re.search("forward|backward", started[0])):
            return run.stdout
        assert len(started) == 1
        return None

    until_undisturbed(measured)
