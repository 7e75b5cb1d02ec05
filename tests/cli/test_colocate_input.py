"""What `cotenant bench colocate` says of flags, traces and files that it cannot take."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.colocation import SHORT, TRAINING, bench_colocate


@pytest.mark.parametrize("name", ["short.csv", "colocate.json", "page.html", "."])
def test_no_other_file_of_the_run_becomes_its_trace(tmp_path: Path, name: str) -> None:
    (tmp_path / "short.csv").write_text(SHORT)
    flags = ["--trace", str(tmp_path / "short.csv"), "--json", str(tmp_path / "colocate.json")]
    flags += ["--html", str(tmp_path / "page.html")]
    result = bench_colocate("tiny", *TRAINING, *flags, "--trace-file", str(tmp_path / name))
    assert result.returncode == 2
    assert result.stderr.startswith("error: --trace-file: ")
    assert (tmp_path / "short.csv").read_text() == SHORT


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--json", "short.csv"], "--json: {}/short.csv is read in this run; name another file"),
        (["--html", "short.csv"], "--html: {}/short.csv is read in this run; name another file"),
        (["--json", "x", "--html", "x"], "--html: {}/x is the file of --json; name another file"),
        (["--trace-file", "notes.txt"], "--trace-file: {}/notes.txt is there and is no trace; name another file"),
    ],
)
def test_nothing_is_written_over_what_is_needed(tmp_path: Path, flags: list[str], complaint: str) -> None:
    for name in ("short.csv", "notes.txt"):
        (tmp_path / name).write_text(SHORT)
    asked = [each if each.startswith("--") else str(tmp_path / each) for each in flags]
    result = bench_colocate("tiny", *TRAINING, "--trace", str(tmp_path / "short.csv"), *asked)
    assert result.returncode == 2
    assert result.stderr == f"error: {complaint.format(tmp_path)}\n"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"short.csv": SHORT, "notes.txt": SHORT}


def test_two_traces_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    paths = [tmp_path / "trace.csv", tmp_path / "other" / "trace.csv"]
    for path in paths:
        path.write_text(SHORT)
    result = bench_colocate("tiny", *TRAINING, "--trace", str(paths[0]), "--trace", str(paths[1]))
    assert result.returncode == 2
    assert "--trace: two files are named trace" in result.stderr


@pytest.mark.parametrize("part", [(), ("--busiest", "5"), ("--window", "0:")])
def test_requests_that_all_come_at_once_leave_no_time_to_measure_in(tmp_path: Path, part: tuple[str, ...]) -> None:
    path = tmp_path / "burst.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:15:46.0,12,4\n" * 3)
    result = bench_colocate("tiny", *TRAINING, "--batch-sizes", "", "--trace", str(path), *part)
    assert result.returncode == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: --trace: all requests of burst come at one moment")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--policies", "multitask,fastest"], "error: --policies: each must be one of adaptive, "),
        (["--slo-tpot-ms", "10,fast"], "--slo-tpot-ms: expected numbers above 0"),
        (["--policies", " ,"], "--policies: which are to be measured?"),
        (["--batch-sizes", ""], "--batch-sizes or --trace"),
        (["--batch-sizes", "0.5"], "--batch-sizes: expected whole numbers"),
        (["--seq-len", "5000"], "--seq-len: 5000 is too long: tiny takes 1024 tokens"),
        (["--seq-len", "48", "--tokens-per-step", "64"], "--tokens-per-step: 64 is not a multiple of --seq-len 48"),
        (["--trace", "/no/such/file", "--batch-sizes", ""], "--trace: /no/such/file cannot be read"),
        (["--resume"], "--resume goes on with the file of --json: give it"),
        (["--window", "0:5"], "--window, --busiest, --cell-seconds and --time-scale are of a trace: give --trace"),
        (["--time-scale", "2"], "--window, --busiest, --cell-seconds and --time-scale are of a trace: give --trace"),
        (["--trace", "x.csv", "--batch-sizes", "", "--context", "9"], "are of steady decoding: give --batch-sizes"),
        (["--slo-tpot-ms", "10,1e300"], "--slo-tpot-ms: must be above 0 and at most 1e9"),
        (["--slo-ttft-ms", "inf"], "--slo-ttft-ms: must be above 0 and at most 1e9"),
        (["--slo-itl-ms", "nan"], "--slo-itl-ms: must be above 0 and at most 1e9"),
        (["--policies", "adaptive", "--skip-hopeless"], "--skip-hopeless: --policies must have inference-only"),
        (
            ["--batch-sizes", "32", "--context", "1000", "--num-tokens", "400"],
            "error: --context: 400 tokens of 32 sequences around 1000 take up to 1536 with those before the timing, ",
        ),
        (
            ["--batch-sizes", "64"],
            "error: --batch-sizes: 64 sequences have up to 1049 tokens with those before the timing",
        ),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], complaint: str) -> None:
    result = bench_colocate("tiny", *TRAINING, *arguments)
    assert result.returncode == 2
    assert complaint in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
