"""bench/measure.py: the commands behind docs/benchmarks.md, run again."""

from __future__ import annotations

import functools
import json
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from forked import run_command
from undisturbed import until_undisturbed

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "measure.py"
CATALOGUE = tomllib.loads((ROOT / "bench" / "measurements.toml").read_text())["measurement"]

WORK = """
import json, os, pathlib, sys, time
value, path = sys.argv[1:3]
if value == "fail":
    sys.exit("it does not work")
if value == "slow":
    time.sleep(60)
if len(sys.argv) > 3:
    print("printed", file=sys.stderr)
    print("gpu", os.environ["CUDA_VISIBLE_DEVICES"])
else:
    times = json.loads(pathlib.Path(path).read_text())["times"] if pathlib.Path(path).exists() else 0
    found = {"value": value, "times": times + 1, "trace": pathlib.Path("a.csv").exists()}
    pathlib.Path(path).write_text(json.dumps(found))
"""


@pytest.fixture
def catalogue(tmp_path: Path) -> Path:
    script = tmp_path / "work.py"
    script.write_text(WORK)
    command = f"python {shlex.quote(str(script))} {{value}} {{json}}"
    entries: list[dict[str, Any]] = [
        {"name": "two", "result": "two_gpu.json", "seconds": 0, "command": command, "values": ["1", "2"]},
        {"name": "text", "result": "text_gpu.txt", "seconds": 0, "command": command.replace("{value}", "3") + " print"},
        {"name": "bad", "result": "bad_gpu.json", "seconds": 0, "command": command, "values": ["fail", "4"]},
        {"name": "slow", "result": "slow_gpu.json", "seconds": 0, "command": command, "values": ["slow"]},
        {"name": "long", "result": "long_gpu.json", "seconds": 100, "command": command, "values": ["5"]},
        {"name": "named", "result": "named_gpu.json", "seconds": 0, "command": command.replace(" {json}", "")},
    ]
    path = tmp_path / "catalogue.toml"
    lines = []
    for entry in entries:
        lines += ["[[measurement]]", *(f"{name} = {json.dumps(value)}" for name, value in entry.items())]
    lines += ["[measurement.values]", 'first = "6 named-first.json"', 'second = "7 named-second.json"']
    path.write_text("\n".join(lines))
    return path


def measure(catalogue: Path, *arguments: str, out: Path | None = None) -> subprocess.CompletedProcess[str]:
    folder = out or catalogue.parent / "out"
    command = [sys.executable, str(SCRIPT), "--catalogue", str(catalogue), "--out", str(folder)]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=200, check=False)


def test_results_of_several_commands_become_one_and_are_measured_once(catalogue: Path) -> None:
    out = catalogue.parent / "out"
    out.mkdir()
    (out / "a.csv").touch()
    for _ in range(2):
        result = measure(catalogue, "two", "text", "--gpus", "2")
        assert result.returncode == 0, result.stderr
        assert f"two: {out / 'results' / 'two_gpu.json'}" in result.stdout
        found = json.loads((out / "results" / "two_gpu.json").read_text())
        assert found == [{"value": value, "times": 1, "trace": True} for value in ("1", "2")]
        assert (out / "results" / "text_gpu.txt").read_text() in ("gpu 0\n", "gpu 1\n")
        assert (out / "text.log").read_text() == "printed\n"


def test_values_may_have_names_and_be_several_arguments(catalogue: Path) -> None:
    assert measure(catalogue, "named").returncode == 0
    found = json.loads((catalogue.parent / "out" / "results" / "named_gpu.json").read_text())
    assert [each["value"] for each in found] == ["6", "7"]
    assert "{value} of second: 7 named-second.json" in measure(catalogue, "--list").stdout


def test_what_fails_is_named_and_the_others_go_on(catalogue: Path) -> None:
    out = catalogue.parent / "out"
    result = measure(catalogue, "bad", "two")
    assert result.returncode == 1
    assert f"bad-fail failed: {out / 'bad-fail.log'} says why" in result.stderr
    assert "it does not work" in (out / "bad-fail.log").read_text()
    assert (out / "bad-4.json").exists()
    assert not (out / "results" / "bad_gpu.json").exists()
    assert (out / "results" / "two_gpu.json").exists()


def test_what_has_ended_is_kept_when_it_is_told_to_stop(catalogue: Path) -> None:
    out = catalogue.parent / "out"
    command = [sys.executable, str(SCRIPT), "--catalogue", str(catalogue), "--out", str(out), "two", "slow"]
    process = subprocess.Popen(command)
    deadline_s = time.monotonic() + 120
    while not (out / "slow-slow.log").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    process.terminate()
    assert process.wait(120) == 128 + signal.SIGTERM
    assert measure(catalogue, "two").returncode == 0
    found = json.loads((out / "results" / "two_gpu.json").read_text())
    assert [each["times"] for each in found] == [1, 1]


def test_what_has_no_time_left_is_cut_off_or_not_begun(catalogue: Path) -> None:
    def cut_off(attempt: int) -> str | None:
        seconds, out = 2 * 3**attempt, catalogue.parent / f"out-{attempt}"
        result = measure(catalogue, "slow", "long", "two", "--gpus", "2", "--seconds", str(seconds), out=out)
        assert result.returncode == 3
        assert "cut off: start it again to go on" in result.stderr
        assert not (out / "results" / "slow_gpu.json").exists()
        assert not (out / "long-5.log").exists(), "it would not have come to its end"
        if (out / "results" / "two_gpu.json").exists():
            return None
        return f"{seconds} s were too few for two commands that do next to nothing"

    until_undisturbed(cut_off, num_runs=3)


def test_a_name_that_is_not_there_is_refused(catalogue: Path) -> None:
    result = measure(catalogue, "two", "three")
    assert result.returncode == 2
    assert "three: expected some of two, text, bad, slow, long, named" in result.stderr


def text_of(script: Path) -> str:
    """With that of the scripts beside it whose names it imports."""
    text = script.read_text()
    beside = (script.with_name(f"{name}.py") for name in re.findall(r"^from (\w+) import", text, re.MULTILINE))
    return "\n".join([text, *(each.read_text() for each in beside if each.is_file())])


@functools.cache
def help_of(*names: str) -> str:
    """What a command of ``cotenant`` says of its flags: many entries have the same one."""
    told = run_command(*names, "--help")
    assert told.returncode == 0, told.stderr
    return told.stdout


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: str(entry["name"]))
def test_the_commands_of_the_catalogue_can_be_run(entry: dict[str, Any]) -> None:
    """Their flags exist, and docs/benchmarks.md has a place for what they measure."""
    program, *rest = shlex.split(entry["command"])
    if program == "cotenant":
        known = help_of(*(word for word in rest[:2] if not word.startswith("-")))
    else:
        known = text_of(ROOT / rest[0])  # some import what only a GPU's machine has
    values = entry.get("values", [])
    more = shlex.split(" ".join(values.values())) if isinstance(values, dict) else []
    flags = {word.partition("=")[0] for word in [*rest, *more] if word.startswith("--")}
    assert flags <= set(re.findall(r"--[\w-]+", known))
    assert (ROOT / "bench" / "results" / entry["result"]).is_file()
