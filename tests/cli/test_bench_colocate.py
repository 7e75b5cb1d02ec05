"""`cotenant bench colocate` on a small model, and on the built-in one where a message names it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from cotenant.bench.device_losses import losses
from cotenant.bench.traces import Trace, TraceRequest
from cotenant.cli.colocate_loads import plan_trace, steady_lengths
from cotenant.cli.main import app
from cotenant.core.errors import InvalidInputError
from cotenant.engine.engine import OnlineEngine
from cotenant.runtime.colocate_bench import ColocateBench
from cotenant.runtime.colocate_cell import Cell
from forked import run_command
from small_model import small_model

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.0,20,12
2023-11-16 18:15:46.2,33,1
2023-11-16 18:15:46.3,5000,9
2023-11-16 18:15:46.5,8,20
"""
SHORT = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.0,12,4
2023-11-16 18:15:46.3,9,6
"""
TRAINING = ["--seq-len", "16", "--tokens-per-step", "16", "--alone-seconds", "0.5", "--device", "cpu"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("bench", *arguments)


def bench_colocate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return bench("colocate", *arguments)


def had_the_machine(report: dict[str, Any]) -> bool:
    """Whether requests ran in each cell, and training where there was time for it: nothing does where something else
    has the machine throughout a cell of a trace, which takes half a second."""
    requests_ran = all(sum(cell["timeline"]["online_share"]) > 0 for cell in report["cells"])
    return requests_ran and report["comparison"]["places"][3]["best_other"] == "multitask"


def test_what_requests_wait_and_what_training_gets(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    (tmp_path / "short & <b>.csv").write_text(SHORT)
    path, page = tmp_path / "colocate.json", tmp_path / "pages" / "colocate.html"
    load = ["--batch-sizes", "3", "--context", "40", "--num-tokens", "16", "--min-requests", "3"]
    load += ["--trace", str(tmp_path / "trace.csv"), "--trace", str(tmp_path / "short & <b>.csv")]
    targets = ["--slo-tpot-ms", "0.1,10000", "--slo-ttft-ms", "60000", "--policies", "multitask,inference-only"]
    model = small_model(tmp_path)
    for _ in range(5):
        result = bench_colocate(*model, *TRAINING, *load, *targets, "--json", str(path), "--html", str(page))
        assert result.returncode == 0, result.stderr
        report = json.loads(path.read_text())
        if had_the_machine(report):
            break
    else:
        pytest.fail("in each of five runs there is a cell in which nothing ran")
    assert (report["kind"], report["model"]) == ("colocate", model[0])
    assert report["train_alone_tokens_per_s"] > 0
    assert report["train_alone_utilisation"] is None, "there is no GPU"
    cells = report["cells"]
    assert [(cell.get("trace"), cell["slo"]["tpot_ms"], cell["policy"]) for cell in cells] == [
        (trace, tpot_ms, policy)
        for trace in (None, "trace", "short & <b>")
        for tpot_ms in (0.1, 10000)
        for policy in ("multitask", "inference-only")
    ]
    for cell in cells:
        assert cell["num_failed"] == 0
        assert (cell["ttft_ms"] is None) == (cell["cdf"]["ttft_ms"] is None) == (cell["load"] == "steady")
        assert 0 < cell["itl_ms"]["p50"] == pytest.approx(cell["cdf"]["itl_ms"][50])
        assert cell["itl_ms"]["p99"] is cell["tpot_ms"]["p99"] is None, "nothing has a hundred values here"
        assert cell["cdf"]["tpot_ms"] == sorted(cell["cdf"]["tpot_ms"])
        assert len(cell["cdf"]["tpot_ms"]) == 101
        assert cell["utilisation"] is None
        lost = losses(cell)
        assert (lost is None) == (cell["harvest"] == 0)
        if lost is not None:
            assert cell["harvest"] + sum(lost.values()) == pytest.approx(1.0, abs=1e-3)
            assert lost["decode alone"] > 0
            assert lost["rest"] > -0.01, "one thing at a time runs on a CPU"
        errors = [error for error in cell["prediction_error"].values() if error is not None]
        assert errors or cell["load"] == "trace", "steps are learned before steady ones are timed"
        assert sum(error["iterations"] for error in errors) <= sum(cell["iterations"].values())
        for worst in (each for error in errors for each in error["farthest_off"]):
            assert worst.get("num_decode", 0) + worst.get("prefill_tokens", 0) > 0
            assert worst["apart_ms"] > 0
        timeline = cell["timeline"]
        assert len(timeline["seconds"]) == len(timeline["step_ms"]) == len(timeline["trained_tokens"]) <= 200
        assert timeline["seconds"][-1] == pytest.approx(cell["duration_s"], abs=1e-2)
        trained = timeline["trained_tokens"][-1] / cell["duration_s"]
        assert trained == pytest.approx(cell["train_tokens_per_s"], rel=0.01, abs=1)
        assert any(timeline["best_effort_share"]) == (cell["harvest"] > 0)
        if cell["policy"] == "inference-only":
            assert cell["harvest"] == 0.0
            assert set(cell["iterations"]) == {"none"}
    assert [cell["num_requests"] for cell in cells[::4]] == [3, 3, 4], "one is too long for the model; two runs of two"
    assert [cell["num_runs"] for cell in cells[4::4]] == [1, 2]
    check_report(report, page, result.stdout)
    again = bench("colocate-report", str(path), "--html", str(tmp_path / "again.html"))
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "again.html").read_text() == page.read_text()
    relaxed = cells[2]
    assert relaxed["iterations"]["temporal"] > 0, "with such targets training runs beside every step"
    assert relaxed["harvest"] > 0
    assert relaxed["attainment"] == 1.0
    expected = relaxed["train_tokens_per_s"] / report["train_alone_tokens_per_s"]
    assert relaxed["harvest"] == pytest.approx(expected, abs=1e-3)


def check_report(report: dict[str, Any], page: Path, printed: str) -> None:
    """The comparison and the page belong to the figures."""
    comparison = report["comparison"]
    assert len(comparison["places"]) == 6
    assert comparison["averages"]["inference-only"] == 0.0
    relaxed = comparison["places"][3]
    assert relaxed["policies"]["multitask"]["meets_slo"]
    assert "The SLO is met where at least 0.99 of the requests met both targets" in printed
    root = ElementTree.fromstring(page.read_text(encoding="utf-8"))
    text = " ".join(root.itertext())
    assert "where the device's time goes" in printed
    assert "Where the device's time goes" in text
    assert "short & <b> x 1 at 10000 ms" in text
    names = [caption.text or "" for caption in root.iter("figcaption")]
    for policy in ("multitask", "inference-only"):
        assert f"{policy}: who has the device" in names


def test_prompts_have_their_kernels_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    order = list[str]()

    def alone(_: ColocateBench, __: float) -> float:
        order.append("training alone")
        raise InvalidInputError("that is enough")

    monkeypatch.setattr(OnlineEngine, "wait_for_kernels", lambda _: order.append("kernels"))
    monkeypatch.setattr(ColocateBench, "alone", alone)
    load = ["--batch-sizes", "2", "--context", "40", "--num-tokens", "16"]
    result = CliRunner().invoke(app, ["bench", "colocate", "tiny", *TRAINING, *load])
    assert isinstance(result.exception, InvalidInputError)
    assert order == ["kernels", "training alone"]


def test_what_is_not_given_is_what_a_small_model_takes(tmp_path: Path) -> None:
    path = tmp_path / "colocate.json"
    flags = ["--policies", "inference-only", "--slo-tpot-ms", "10000", "--alone-seconds", "0.5", "--device", "cpu"]
    result = bench_colocate(*small_model(tmp_path, 1000), *flags, "--batch-sizes", "2,4", "--json", str(path))
    assert result.returncode == 0, result.stderr
    report = json.loads(path.read_text())
    assert (report["training"]["seq_len"], report["training"]["tokens_per_step"]) == (1000, 4000)
    lengths = {(cell["context"], cell["num_tokens"]) for cell in report["cells"]}
    assert lengths == {(680, 79)}, "640 tokens come before the timed ones, and up to 272 more, and 8 for four sequences"


def test_all_policies_are_timed_over_the_same_contexts(tmp_path: Path) -> None:
    """However long each of them learns."""
    path, trace = tmp_path / "colocate.json", tmp_path / "trace.json"
    flags = ["--policies", "inference-only,whole-step,multitask,harli", "--slo-tpot-ms", "10000"]
    flags += ["--batch-sizes", "2", "--num-tokens", "16", "--json", str(path), "--trace-file", str(trace)]
    result = bench_colocate(*small_model(tmp_path, 1000), *TRAINING, *flags)
    assert result.returncode == 0, result.stderr
    assert "harli: no multiprocessors are divided here" in result.stderr
    assert "no room for one" not in result.stderr
    (context,) = {cell["context"] for cell in json.loads(path.read_text())["cells"]}
    begun: dict[str, int] = {}
    policy = None
    for event in json.loads(trace.read_text()):
        if event["name"].startswith("measured from here: "):
            policy = event["name"].removeprefix("measured from here: ").partition(",")[0]
        elif event["name"].startswith("decode") and policy is not None:
            begun.setdefault(policy, event["args"]["context_tokens"] // 2)
    del begun["training alone"]
    assert list(begun) == ["inference-only", "whole-step", "multitask", "harli"]
    assert all(context - 16 // 2 <= tokens <= context - 16 // 2 + 6 for tokens in begun.values()), begun


@pytest.mark.parametrize(
    ("context", "num_tokens", "batch_size", "limit", "chosen"),
    [
        (None, None, 32, 8192, (1024, 512)),
        (None, None, 4, 1560, (1024, 512)),
        (None, None, 4, 1559, (1023, 512)),
        (None, None, 32, 1024, (664, 47)),
        (None, 400, 4, 1400, (920, 400)),
        (700, None, 4, 1400, (700, 479)),
        (2, None, 4, 1000, (2, 79)),
        (5000, 512, 4, 100, (5000, 512)),
    ],
)
def test_lengths_that_are_not_given_fit(
    context: int | None, num_tokens: int | None, batch_size: int, limit: int, chosen: tuple[int, int]
) -> None:
    assert steady_lengths(context, num_tokens, batch_size, limit) == chosen


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    arguments = [*small_model(tmp_path), *TRAINING, "--batch-sizes", "2", "--context", "40", "--num-tokens", "16"]
    arguments += ["--slo-tpot-ms", "10000", "--policies", "inference-only,whole-step", "--json", str(path)]
    assert bench_colocate(*arguments).returncode == 0
    whole = json.loads(path.read_text())
    kept, lost = whole["cells"]
    path.write_text(json.dumps({**whole, "cells": [kept]}))
    again = bench_colocate(*arguments, "--resume")
    assert again.returncode == 0, again.stderr
    resumed = json.loads(path.read_text())
    assert resumed["cells"][0] == kept
    assert resumed["cells"][1]["policy"] == lost["policy"]
    assert resumed["cells"][1]["timeline"] != lost["timeline"]
    assert resumed["runs"][0] == {name: whole[name] for name in ("command", "train_alone_tokens_per_s")}
    assert resumed["runs"][1]["train_alone_tokens_per_s"] == resumed["train_alone_tokens_per_s"]
    assert bench_colocate(*arguments, "--resume").returncode == 0
    assert json.loads(path.read_text()) == resumed, "nothing was left to measure"
    others = [each for each in arguments if each not in ("--load-format", "dummy")]
    real = bench_colocate(*others, "--resume")
    assert real.returncode == 2
    assert "--load-format: the file of --json has dummy, not auto; --resume goes on with the same" in real.stderr


def test_another_part_of_a_trace_is_measured_too(tmp_path: Path) -> None:
    rows = [f"2023-11-16 18:15:4{second}.{tenth},12,4" for second in (0, 1) for tenth in (0, 5)]
    (tmp_path / "conv.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    path, page = tmp_path / "grid.json", tmp_path / "grid.html"
    arguments = [*small_model(tmp_path), *TRAINING, "--batch-sizes", "", "--trace", str(tmp_path / "conv.csv")]
    arguments += ["--min-requests", "1", "--slo-tpot-ms", "10000", "--policies", "inference-only"]
    arguments += ["--learning-seconds", "0.1", "--json", str(path), "--html", str(page), "--resume"]
    for window in ("0:1", "1:2", "0:1"):
        result = bench_colocate(*arguments, "--window", window)
        assert result.returncode == 0, result.stderr
    cells = json.loads(path.read_text())["cells"]
    assert [cell["window_s"] for cell in cells] == [[0.0, 1.0], [1.0, 2.0]]
    assert cells[0]["request_rate"] == cells[1]["request_rate"]
    assert all(f"conv (from {second} s) x 1 at 10000 ms" in page.read_text() for second in (0, 1))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_tells_what_it_has_and_goes_on(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, page, measure = tmp_path / "grid.json", tmp_path / "grid.html", ColocateBench.steady
    arguments = [*small_model(tmp_path), *TRAINING, "--batch-sizes", "2", "--context", "40", "--num-tokens", "16"]
    arguments += ["--slo-tpot-ms", "10000", "--policies", "inference-only,whole-step", "--json", str(path)]

    def interrupted(self: ColocateBench, policy: str, *rest: Any) -> Cell:
        if policy == "whole-step":
            if number is signal.SIGINT:  # which a program in the background ignores
                raise KeyboardInterrupt
            os.kill(os.getpid(), number)
        return measure(self, policy, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(ColocateBench, "steady", interrupted)
        result = CliRunner().invoke(app, ["bench", "colocate", *arguments, "--html", str(page)])
    assert result.exit_code == 130
    said = result.stderr.strip().splitlines()[-1]
    assert said == "error: interrupted: 1 cell measured; --resume goes on with them"
    assert page.exists()
    (kept,) = json.loads(path.read_text())["cells"]
    assert bench_colocate(*arguments, "--resume").returncode == 0
    resumed = json.loads(path.read_text())["cells"]
    assert resumed[0] == kept
    assert [cell["policy"] for cell in resumed] == ["inference-only", "whole-step"]
    assert bench_colocate(*arguments).returncode == 0, "anew: what was there is kept"
    assert json.loads((tmp_path / "grid.json.old").read_text())["cells"] == resumed


def test_a_run_does_not_go_on_with_what_was_measured_otherwise(tmp_path: Path) -> None:
    (tmp_path / "short.csv").write_text(SHORT)
    path = tmp_path / "grid.json"
    flags = [*small_model(tmp_path), *TRAINING, "--batch-sizes", "", "--min-requests", "1", "--slo-tpot-ms", "10000"]
    flags += ["--policies", "inference-only", "--json", str(path), "--trace"]
    assert bench_colocate(*flags, str(tmp_path / "short.csv")).returncode == 0
    before = path.read_bytes()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "short.csv").write_text(SHORT.replace(",4", ",7"))
    refused = bench_colocate(*flags, str(tmp_path / "other" / "short.csv"), "--resume")
    assert refused.returncode == 2
    complaint = "the file of --json was measured with another trace that is named short; rename this one"
    assert refused.stderr == f"error: --trace: {complaint}\n"
    for flag, given, known in (  # also where nothing is left to measure
        ("--learning-seconds", "3.0", "8.0"),
        ("--max-model-len", "500", "0"),
        ("--rounds", "3", "1"),
        ("--seq-len", "8", "16"),
        ("--r", "4", "16"),
        ("--dtype", "bfloat16", "float32"),
        ("--compress-weights", "on", "off"),
    ):
        refused = bench_colocate(*flags, str(tmp_path / "short.csv"), "--resume", flag, given)
        assert refused.returncode == 2, flag
        complaint = f"error: {flag}: the file of --json has {known}, not {given}; --resume goes on with the same"
        assert refused.stderr.splitlines()[-1] == complaint
    assert path.read_bytes() == before
    for dtype in ("float32", "float", "auto"):
        assert bench_colocate(*flags, str(tmp_path / "short.csv"), "--resume", "--dtype", dtype).returncode == 0


def test_a_place_is_measured_in_rounds_and_seen_in_a_trace(tmp_path: Path) -> None:
    (tmp_path / "short.csv").write_text(SHORT)
    path, trace = tmp_path / "colocate.json", tmp_path / "traces" / "trace.json"
    flags = ["--batch-sizes", "", "--trace", str(tmp_path / "short.csv"), "--min-requests", "1", "--rounds", "2"]
    flags += ["--slo-tpot-ms", "10000,10000", "--slo-ttft-ms", "60000", "--policies", "inference-only,multitask"]
    flags = [*small_model(tmp_path), *TRAINING, *flags, "--json", str(path)]
    result = bench_colocate(*flags, "--trace-file", str(trace))
    assert result.returncode == 0, result.stderr
    cells = json.loads(path.read_text())["cells"]
    assert [(cell["policy"], cell["num_requests"], cell["num_failed"]) for cell in cells] == [
        ("inference-only", 4, 0),
        ("multitask", 4, 0),
    ]
    assert min(cells[1]["harvest_of_runs"]) <= cells[1]["harvest"] <= max(cells[1]["harvest_of_runs"])
    events = json.loads(trace.read_text())
    marks = [event["name"] for event in events if event["ph"] == "i"]
    policies = ("inference-only", "multitask", "multitask", "inference-only")
    measured = ["training alone", *(f"{policy}, TPOT target 10000 ms, 2 requests" for policy in policies)]
    assert marks[:-1:2] == [f"measured from here: {each}" for each in measured]
    assert marks[1::2] == ["measured until here"] * len(measured)
    assert marks[-1] == "end"
    assert any(event["name"].startswith("prefill") for event in events)


def test_training_plans_no_longer_gap_than_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    arguments = [*small_model(tmp_path), *TRAINING, "--batch-sizes", "2", "--context", "40", "--num-tokens", "16"]
    arguments += ["--slo-tpot-ms", "10000", "--policies", "multitask", "--json", str(path)]
    result = bench_colocate(*arguments, "--slo-itl-ms", "0.001")
    assert result.returncode == 0, result.stderr
    (cell,) = json.loads(path.read_text())["cells"]
    assert (set(cell["iterations"]), cell["harvest"]) == ({"none"}, 0.0), "a step alone is a longer gap"
    other = bench_colocate(*arguments, "--resume")
    assert other.returncode == 2
    assert "--slo-itl-ms: the file of --json has 0.001, not the default; --resume goes on with the same" in other.stderr


def test_forwards_run_inside_batches_where_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    arguments = [*small_model(tmp_path), *TRAINING, "--batch-sizes", "2", "--context", "40", "--num-tokens", "16"]
    arguments += ["--slo-tpot-ms", "10000", "--policies", "multitask", "--json", str(path)]
    result = bench_colocate(*arguments, "--fuse")
    assert result.returncode == 0, result.stderr
    (cell,) = json.loads(path.read_text())["cells"]
    assert cell["iterations"]["fused"] > 0
    other = bench_colocate(*arguments, "--resume")
    assert other.returncode == 2
    assert "--fuse: the file of --json has on, not the default; --resume goes on with the same" in other.stderr


def test_where_serving_alone_misses_the_slo_nothing_else_is_measured(tmp_path: Path) -> None:
    path, trace = tmp_path / "grid.json", tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:4{second},12,4" for second in ("6.0", "6.5", "7.5")]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    arguments = [*small_model(tmp_path), *TRAINING, "--batch-sizes", "", "--trace", str(trace), "--cell-seconds", "1"]
    arguments += ["--min-requests", "1", "--time-scale", "0.5,1", "--slo-tpot-ms", "0.001,10000"]
    arguments += ["--learning-seconds", "0.1"]
    arguments += ["--slo-ttft-ms", "60000", "--policies", "multitask,inference-only", "--skip-hopeless"]
    arguments += ["--json", str(path)]
    result = bench_colocate(*arguments)
    assert result.returncode == 0
    assert "learning how long things take" in result.stderr
    assert "no room for one beside a step where the TPOT target is 0.001 ms; shorter ones: --task" in result.stderr
    report = json.loads(path.read_text())
    found = [(cell["time_scale"], cell["slo"]["tpot_ms"], cell["policy"]) for cell in report["cells"]]
    assert found == [
        (scale, tpot_ms, policy)
        for scale in (0.5, 1)
        for tpot_ms, policy in ((0.001, "inference-only"), (10000, "inference-only"), (10000, "multitask"))
    ]
    assert [(cell["window_s"], cell["duration_s"], cell["num_requests"]) for cell in report["cells"][::3]] == [
        ([0.0, 0.5], 1.0, 1),
        ([0.0, 1.0], 1.0, 2),
    ]
    again = bench_colocate(*arguments, "--resume")
    assert again.returncode == 0
    assert json.loads(path.read_text()) == report, "nothing was left to measure"
    assert "learning" not in again.stderr


@pytest.mark.parametrize(
    ("min_requests", "time_scale", "window_s", "num_runs", "num_requests"),
    [
        (1, 1.0, (0.0, 1.0), 1, 2),
        (1, 0.5, (0.0, 0.5), 1, 1),
        (2, 0.5, (0.0, 0.6), 1, 2),
        (3, 0.5, None, 1, 3),
        (1, 2.0, None, 1, 3),
        (4, 1.0, None, 2, 6),
    ],
)
def test_a_cell_goes_on_until_enough_requests_have_come(
    min_requests: int, time_scale: float, window_s: tuple[float, float] | None, num_runs: int, num_requests: int
) -> None:
    trace = Trace("azure", [TraceRequest(at_s, 8, 8) for at_s in (0.0, 0.5, 1.5)])
    plan = plan_trace("trace", trace, time_scale, min_requests, seconds=1.0)
    assert (plan.parameters["window_s"], plan.parameters["num_runs"]) == (window_s, num_runs)
    assert len(plan.trace.requests) == num_requests


def cell(policy: str, tpot_ms: float | None, tokens_per_s: float) -> dict[str, Any]:
    load = {"load": "steady", "batch_size": 2, "context": 40, "num_tokens": 16}
    figures = {"train_tokens_per_s": tokens_per_s, "attainment": 1.0, "num_requests": 2}
    figures |= dict.fromkeys(("ttft_ms", "tpot_ms", "itl_ms"))
    return {**load, "policy": policy, "slo": {"ttft_ms": 500.0, "tpot_ms": tpot_ms}, **figures}


def part(alone: float, *cells: dict[str, Any], **changes: object) -> dict[str, Any]:
    report = {"kind": "colocate", "model": "tiny", "device": "cpu", "command": f"bench {alone}"}
    figures = [{**each, "harvest": each["train_tokens_per_s"] / alone} for each in cells]
    return {**report, "train_alone_tokens_per_s": alone, "cells": figures, **changes}


def test_parts_of_a_grid_become_one(tmp_path: Path) -> None:
    first = part(100.0, cell("static", 10.0, 20.0), cell("adaptive", 10.0, 40.0))
    second = part(104.0, cell("adaptive", 40.0, 80.0), cell("static", 10.0, 30.0), cell("static", 40.0, 50.0))
    paths = [tmp_path / "first.json", tmp_path / "second.json", tmp_path / "whole.json"]
    for path, report in zip(paths, (first, second), strict=False):
        path.write_text(json.dumps(report))
    result = bench("colocate-report", *map(str, paths[:2]), "--json", str(paths[2]))
    assert result.returncode == 0, result.stderr
    whole = json.loads(paths[2].read_text())
    found = [(each["policy"], each["slo"]["tpot_ms"], each["train_tokens_per_s"]) for each in whole["cells"]]
    assert found == [("static", 10.0, 30.0), ("adaptive", 10.0, 40.0), ("adaptive", 40.0, 80.0), ("static", 40.0, 50.0)]
    assert whole["train_alone_tokens_per_s"] == 102.0
    assert [run["command"] for run in whole["runs"]] == ["bench 100.0", "bench 104.0"]
    averages = {"static": (30 / 104 + 50 / 104) / 2 * 102, "adaptive": (40 / 100 + 80 / 104) / 2 * 102}
    assert whole["comparison"]["averages"] == pytest.approx(averages, abs=0.02), "as if training alone were as fast"


def test_what_cannot_be_compared_is_not_put_together(tmp_path: Path) -> None:
    paths = [tmp_path / "first.json", tmp_path / "second.json"]
    paths[0].write_text(json.dumps(part(100.0)))
    paths[1].write_text(json.dumps(part(100.0, device="NVIDIA H200")))
    result = bench("colocate-report", *map(str, paths), "--json", str(tmp_path / "whole.json"))
    assert result.returncode == 2
    assert f"{paths[1]} has device 'NVIDIA H200', not 'cpu': they cannot be compared" in result.stderr
    arguments = ["--batch-sizes", "2", "--context", "40", "--num-tokens", "16", "--policies", "inference-only"]
    resumed = bench_colocate("tiny", *TRAINING, *arguments, "--resume", "--json", str(paths[1]))
    assert resumed.returncode == 2
    assert "--resume: the file of --json has training None, not {" in resumed.stderr
    assert json.loads(paths[1].read_text()) == part(100.0, device="NVIDIA H200")


@pytest.mark.parametrize(
    ("known", "other", "complaint"),
    [
        ({"max_model_len": 8192}, {"max_model_len": 0}, "{1} has max_model_len 0, {0} 8192"),
        ({"learning_seconds": 8.0}, {"learning_seconds": 0.0}, "{1} has learning_seconds 0.0, {0} 8.0"),
        (
            {"traces": {"code": "11", "conv": "12"}},
            {"traces": {"conv": "13"}},
            "{1} was measured with another trace that is named conv (digest 13) than {0} (12)",
        ),
    ],
)
def test_other_requests_are_not_put_together(
    tmp_path: Path, known: dict[str, Any], other: dict[str, Any], complaint: str
) -> None:
    """But what an earlier version did not write down is no difference, whichever file comes first."""
    paths = [str(tmp_path / name) for name in ("known.json", "other.json", "old.json", "whole.json")]
    for path, changes in zip(paths, (known, other, {}), strict=False):
        Path(path).write_text(json.dumps(part(100.0, **changes)))
    for asked in ([paths[2], paths[0], paths[1]], [paths[2], paths[0]]):
        result = bench("colocate-report", *asked, "--json", paths[3])
        assert result.returncode == (2 if paths[1] in asked else 0), result.stderr
        if paths[1] in asked:
            assert result.stderr == f"error: {complaint.format(*paths)}: they cannot be compared\n"
            assert not Path(paths[3]).exists()
    joined = json.loads(Path(paths[3]).read_text())
    assert joined.get("traces", {}) == known.get("traces", {}), "so that it is known when this goes on"


def test_unlike_numbers_of_rounds_are_told(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("once.json", "thrice.json", "old.json")]
    for path, changes in zip(paths, ({"rounds": 1}, {"rounds": 3}, {}), strict=True):
        Path(path).write_text(json.dumps(part(100.0, **changes)))
    result = bench("colocate-report", *paths)
    assert result.returncode == 0
    assert "cells are of unlike numbers of rounds" in result.stderr
    assert f": {paths[0]} has 1, {paths[1]} has 3" in result.stderr
    assert "rounds" not in bench("colocate-report", paths[0], paths[2]).stderr


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot be read"),
        ("{", "is not what"),
        ('{"kind": "serve"}', "is not what"),
        ("[1]", "is not what"),
        ('{"kind": "colocate"}', "it has no command"),
        ('{"kind": "colocate", "command": "", "train_alone_tokens_per_s": 1, "cells": null}', "it has no cells"),
        (
            '{"kind": "colocate", "command": "", "train_alone_tokens_per_s": 1, "cells": [{"load": "trace"}]}',
            "its cell 0 has no policy",
        ),
        (
            '{"kind": "colocate", "command": "", "train_alone_tokens_per_s": 1, "cells": [3]}',
            "its cell 0 has no fields",
        ),
        (json.dumps(part(100.0, cell("static", None, 20.0))), "its cell 0 has no targets of numbers"),
    ],
)
def test_a_report_of_something_else_is_refused(tmp_path: Path, content: str | None, complaint: str) -> None:
    if content is not None:
        (tmp_path / "figures.json").write_text(content)
    result = bench("colocate-report", str(tmp_path / "figures.json"), "--html", str(tmp_path / "page.html"))
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert complaint in result.stderr
    assert not (tmp_path / "page.html").exists()


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


def test_a_report_of_measurements_is_not_written_over_them(tmp_path: Path) -> None:
    (tmp_path / "figures.json").write_text("{}")
    result = bench("colocate-report", str(tmp_path / "figures.json"), "--html", str(tmp_path / "figures.json"))
    assert result.returncode == 2
    assert "figures.json is read in this run; name another file" in result.stderr
    assert (tmp_path / "figures.json").read_text() == "{}"


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
            ["--context", "1000", "--num-tokens", "400"],
            "error: --context: 400 tokens of 32 sequences around 1000 take up to 1536 with those before the timing, ",
        ),
        (["--batch-sizes", "64"], "error: --batch-sizes: 8 tokens of 64 sequences around 2 take up to "),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], complaint: str) -> None:
    result = bench_colocate("tiny", *TRAINING, *arguments)
    assert result.returncode == 2
    assert complaint in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
