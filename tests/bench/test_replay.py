"""A predictor told of a trace's iterations: what it says of them beside what the one that ran said."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from cotenant.core.plan import BatchShape, IterationRecord, Mode, Partition, Plan, causal_pairs
from cotenant.core.tasklet import TaskletKind, TaskletRun, TaskletShape
from cotenant.runtime.trace import Trace
from forked import run_command
from small_model import small_model
from undisturbed import until_undisturbed

SCRIPT = Path(__file__).parents[2] / "bench" / "replay.py"
LOADS = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.0,12,64
2023-11-16 18:15:{last_s},9,66
"""


def replay(*paths: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, paths)], capture_output=True, text=True, check=False)


def note(trace: Trace, record: IterationRecord, deviation: float | None) -> None:
    trace.iteration([time.perf_counter()] * 5, Plan(), record, deviation)


def test_errors_are_those_of_a_predictor_that_knows_the_trace_alone(tmp_path: Path) -> None:
    """Steps of 10 ms and then one of 12.5, which is the last: it was expected to take 10, which is 20% less."""
    trace, steps = Trace(tmp_path / "trace.json"), BatchShape(4, 4000)
    tasklet = TaskletRun(TaskletShape(TaskletKind.BACKWARD_UP, 2048, 512), 2)
    shared = IterationRecord(
        steps, Mode.SPATIAL, 14.0, 14.0, partition=Partition(48, 84), beside=((tasklet, 6.0),), predicted_ms=13.0
    )
    for _ in range(20):
        note(trace, IterationRecord(steps, Mode.NONE, 10.0, 10.0), 0.5)
        note(trace, shared, 0.25)
    trace.mark("measured from here: adaptive")
    note(trace, IterationRecord(steps, Mode.NONE, 12.5, 12.5), -0.04)
    note(trace, shared, None)
    note(trace, shared, 0.1)
    trace.mark("measured until here")
    note(trace, IterationRecord(steps, Mode.NONE, 99.0, 99.0), 0.0)
    trace.close()
    result = replay(tmp_path / "trace.json")
    assert result.returncode == 0, result.stderr
    assert "unmarked, alone: 17 batches, recorded mean 50.0%, p95 50.0%, 100.0% above 10%; replayed mean 0.0%" in (
        result.stdout
    ), "the first three could not be predicted"
    assert "measured from here: adaptive, alone: 1 batches, recorded mean 4.0%, p95 4.0%, 0.0% above 10%; " in (
        result.stdout
    )
    assert "replayed mean 20.0%, p95 20.0%, 100.0% above 10%" in result.stdout
    assert "measured from here: adaptive, with training: 1 batches, recorded mean 10.0%" in result.stdout
    text = (tmp_path / "trace.json").read_text()
    (tmp_path / "cut.json").write_text(text[: text.rindex("measured until here") - 200].rpartition("\n")[0])
    assert "unmarked, alone: 17 batches" in replay(tmp_path / "cut.json").stdout, "a trace whose end is missing"


def test_of_prompts_it_says_what_a_line_could_come_to_at_best(tmp_path: Path) -> None:
    """What batches with prompts take is a line of their tokens, but for 2%, once more and once less."""
    paths = [tmp_path / "straight.json", tmp_path / "off.json"]
    for path, off in zip(paths, (0.0, 0.02), strict=True):
        trace = Trace(path)
        for turn in range(120):
            tokens, context = 128 * (1 + turn * 7 % 13), 1000 * (turn * 5 % 11)
            batch = BatchShape(0, context, tokens, tokens, turn % 3 % 2, causal_pairs(tokens))
            taken_ms = (4.0 + tokens / 40 + context / 20_000) * (1 + off * (-1) ** turn)
            note(trace, IterationRecord(batch, Mode.NONE, taken_ms, taken_ms), 0.5)
        trace.close()
    printed = replay(*paths).stdout.splitlines()
    assert [line for line in printed if line.endswith(".json")] == ["straight.json", "off.json"]
    straight, off_it = (line for line in printed if line.startswith("with prompts, alone: "))
    assert straight.endswith("at best 0.0%")
    assert re.search(r"recorded mean 50.0%.*; at best (1\.9|2\.0)%$", off_it), off_it


def test_a_cells_iterations_are_in_its_trace(tmp_path: Path) -> None:
    """The second request comes later where so little trained before it that no more than a few batches had tasklets."""
    flags = ["--seq-len", "16", "--tokens-per-step", "16", "--alone-seconds", "0.5", "--device", "cpu"]
    flags += ["--batch-sizes", "", "--trace", str(tmp_path / "short.csv"), "--min-requests", "1"]
    flags += ["--slo-tpot-ms", "10000", "--slo-ttft-ms", "60000", "--policies", "inference-only,adaptive"]
    path = tmp_path / "trace.json"

    def measured(attempt: int) -> str | None:
        (tmp_path / "short.csv").write_text(LOADS.format(last_s=(46.4, 47.4, 49.0, 52.0, 58.0)[attempt]))
        result = run_command("bench", "colocate", *small_model(tmp_path), *flags, "--trace-file", str(path))
        assert result.returncode == 0, result.stderr
        printed = replay(path).stdout
        begin = [line.partition(",")[0] for line in printed.splitlines()]
        loads = set(begin) - {"trace.json", "unmarked"}
        assert loads == {"measured from here: inference-only", "measured from here: adaptive"}
        rows = re.findall(
            r"here: (\S+), TPOT target 10000 ms, 2 requests, (alone|with training): (\d+) batches", printed
        )
        counts = {(policy, kind): int(count) for policy, kind, count in rows}
        assert counts["inference-only", "alone"] > 10, printed
        return None if counts.get(("adaptive", "with training"), 0) > 10 else printed

    until_undisturbed(measured)


def test_what_is_no_trace_is_named(tmp_path: Path) -> None:
    for text, message in (
        ('[\n{"ph":"X","name":"execute","args":{"mode":"none"}},\n', "is no trace that can be replayed: KeyError"),
        ("TIMESTAMP,ContextTokens\n", "is no trace that can be replayed: JSONDecodeError"),
        ('[\n{"ph":"M","name":"thread_name"}\n]\n', "no batch that was predicted"),
    ):
        (tmp_path / "file.json").write_text(text)
        result = replay(tmp_path / "file.json")
        assert result.returncode != 0
        assert message in result.stderr
    assert "is no trace that can be replayed: FileNotFoundError" in replay(tmp_path / "no.json").stderr
