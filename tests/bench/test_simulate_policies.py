"""Policies under a trace without a GPU: a line for each, and bad flags by name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "bench" / "simulate_policies.py"


def simulate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Of 24 requests, two a second."""
    trace = folder / "trace.csv"
    rows = [f"2023-11-16 18:15:{46 + index // 2 % 14:02}.{index % 2 * 5},900,40" for index in range(24)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    command = [sys.executable, str(SCRIPT), str(trace), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_policies_are_compared_where_serving_alone_is_in_time(tmp_path: Path) -> None:
    flags = ["--slo-tpot-ms", "40,1", "--policies", "adaptive", "--requests", "8", "--every", "4"]
    result = simulate(tmp_path, *flags)
    assert result.returncode == 0, result.stderr
    assert "x 1, TPOT target 40 ms: 3 windows that inference-only serves in time" in result.stdout
    found = re.findall(r"^  (\S+) +in time in +3: 100.00%, training +([\d.]+)%", result.stdout, re.MULTILINE)
    assert [name for name, _ in found] == ["inference-only", "adaptive"]
    assert float(found[0][1]) == 0.0
    assert 50.0 < float(found[1][1]) < 100.0
    assert "x 1, TPOT target 1 ms: 0 windows" in result.stdout
    assert "in the 3 others" in result.stdout


def test_the_machine_is_as_fast_as_is_said(tmp_path: Path) -> None:
    """A prompt of 900 tokens is eight tiles: what they add is its time to a first token."""
    flags = ["--slo-tpot-ms", "40", "--policies", "inference-only", "--requests", "8", "--every", "4"]
    for more, count in (([], 3), (["--tiles-ms", "2,3"], 3), (["--tiles-ms", "2,100"], 0), (["--weights-ms", "50"], 0)):
        result = simulate(tmp_path, *flags, *more)
        assert f"40 ms: {count} windows that inference-only serves in time" in result.stdout, (more, result.stderr)


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    for flags, message in (
        (["--policies", "best"], "--policies: 'best' is none of"),
        (["--requests", "25"], "--requests: no window of"),
        (["--requests", "0"], "--requests and --every: must be above 0"),
        (["--every", "0"], "--requests and --every: must be above 0"),
        (["--tiles-ms", "2"], "--tiles-ms: two numbers or more are needed"),
        (["--tiles-ms", "2,x"], "--tiles-ms: expected numbers above 0"),
        (["--weights-ms", "0"], "--weights-ms above 0"),
        (["--time-scale", "fast"], "--time-scale: expected numbers above 0, like 10,40, not 'fast'"),
        (["--slo-tpot-ms", "40,0"], "--slo-tpot-ms: expected numbers above 0"),
    ):
        result = simulate(tmp_path, *flags)
        assert result.returncode == 2
        assert message in result.stderr
    missing = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "no.csv")], capture_output=True, text=True, check=False
    )
    assert missing.returncode == 2
    assert "no.csv cannot be read" in missing.stderr
