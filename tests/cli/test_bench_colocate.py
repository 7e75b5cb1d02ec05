"""`cotenant bench colocate` on a small model, and on the built-in one where a message names it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from cli.colocation import SHORT, TRAINING, bench, bench_colocate
from cotenant.bench.device_losses import losses
from cotenant.cli.main import app
from cotenant.core.errors import InvalidInputError
from cotenant.engine.engine import OnlineEngine
from cotenant.runtime.colocate_bench import ColocateBench
from small_model import small_model

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.0,20,12
2023-11-16 18:15:46.2,33,1
2023-11-16 18:15:46.3,5000,9
2023-11-16 18:15:46.5,8,20
"""


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
    assert (report["training"]["seq_len"], report["training"]["tokens_per_step"]) == (64, 512), "on a CPU"
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
    assert "training will get little or nothing" not in result.stderr, "multitask counts what is left of each request"
    numbers = re.findall(r"measuring cell (\d) of 8", result.stderr)
    assert numbers == list("134578"), "two are needless"
    assert result.stderr.count("serving alone misses the SLO there, so nothing else is measured") == 2
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
