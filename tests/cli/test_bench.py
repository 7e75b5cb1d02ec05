"""`cotenant bench serve`: what a user may get wrong."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cotenant.cli.bench_load import part_of_trace
from forked import run_command

URL = ("--url", "http://127.0.0.1:1")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("bench", "serve", *arguments)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (URL, "give --trace, --request-rate or --sweep"),
        ((*URL, "--trace", "x.csv", "--request-rate", "1"), "give --trace or --request-rate, not both"),
        ((*URL, "--trace", "x.csv", "--sweep", "1,2", "--time-scale", "1"), "give --sweep or --time-scale, not both"),
        ((*URL, "--request-rate", "4", "--sweep", "1,2"), "give --sweep or --request-rate, not both"),
        ((*URL, "--trace", "/nonexistent.csv"), "/nonexistent.csv cannot be read"),
        ((*URL, "--trace", "x", "--window", "0:1", "--busiest", "3"), "give --window or --busiest, not both"),
        ((*URL, "--request-rate", "1", "--window", "0:1"), "--window is of a trace: give --trace"),
        (
            (*URL, "--request-rate", "1", "--time-scale", "2", "--max-output-len", "2"),
            "--time-scale, --max-output-len are of a trace: give --trace",
        ),
        (
            (*URL, "--trace", "x.csv", "--sweep", "1,2", "--random-input-len", "1024", "--burstiness", "1"),
            "--burstiness, --random-input-len are of a synthetic load: leave out --trace, which has its own requests",
        ),
        ((*URL, "--request-rate", "0"), "--request-rate must be above 0"),
        ((*URL, "--request-rate", "nan"), "--request-rate must be above 0"),
        ((*URL, "--request-rate", "inf", "--duration", "3"), "give --num-prompts"),
        ((*URL, "--request-rate", "1", "--burstiness", "0"), "--burstiness must be above 0"),
        ((*URL, "--sweep", "1,fast"), "--sweep: expected a number, got 'fast'"),
        ((*URL, "--request-rate", "1", "--stop-when-missed"), "--stop-when-missed needs"),
        ((*URL, "--request-rate", "1", "--append-result"), "--append-result needs --json"),
        ((*URL, "--request-rate", "1", "--save-detailed"), "--save-detailed needs --json"),
        ((*URL, "--request-rate", "1", "--header", "x"), "--header: expected NAME=VALUE"),
        ((*URL, "--request-rate", "1", "--api-key", "a\nb"), "--api-key: a key is printable ASCII"),
        ((*URL, "--request-rate", "1", "--endpoint", "/v1/chat/completions"), "which chat completions do not take"),
        (("--url", "localhost:8000", "--request-rate", "1"), "localhost:8000 is not a URL"),
        (("--url", "http://[::1", "--request-rate", "1"), "http://[::1 is not a URL like http://127.0.0.1:8000"),
        (("--url", "http://a..b", "--request-rate", "1"), "http://a..b is not a URL like http://127.0.0.1:8000"),
        ((*URL, "--request-rate", "1"), "cannot reach a server at http://127.0.0.1:1"),
        ((*URL, "--request-rate", "1", "--model", "m"), "cannot reach a server at http://127.0.0.1:1"),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], complaint: str) -> None:
    result = bench(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert complaint in line


@pytest.mark.parametrize("window", ["5:2", "-1:3", "a:b", "1", ""])
def test_a_window_is_start_and_end(tmp_path: Path, window: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("Timestamp,Request tokens,Response tokens\n0,5,5\n2,5,5\n")
    result = bench(*URL, "--trace", str(trace), "--window", window)
    assert result.returncode == 2
    assert "--window" in result.stderr


def test_a_trace_is_not_replaced_by_its_figures(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("Timestamp,Request tokens,Response tokens\n0,5,5\n2,5,5\n")
    result = bench(*URL, "--trace", str(trace), "--json", str(trace))
    assert result.returncode == 2
    assert f"--json: {trace} is read in this run" in result.stderr


def test_the_busiest_part_ends_with_the_trace(tmp_path: Path) -> None:
    """Behind its last request nobody comes, so nothing there says what requests wait or what training gets beside
    them."""
    path = tmp_path / "trace.csv"
    path.write_text("Timestamp,Request tokens,Response tokens\n0,5,5\n2,5,5\n4,5,5\n")
    assert part_of_trace(path, None, 3.0).duration_s == 3.0
    assert part_of_trace(path, None, 600.0).duration_s == pytest.approx(4 + 4 / 3)
    assert part_of_trace(path, "1:", None).duration_s == pytest.approx(3 + 4 / 3)


def test_a_file_that_cannot_be_added_to_is_refused_before_the_run(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("not JSON")
    result = bench(*URL, "--request-rate", "1", "--json", str(path), "--append-result")
    assert result.returncode == 2
    assert "cannot be added to" in result.stderr
    assert path.read_text() == "not JSON"
