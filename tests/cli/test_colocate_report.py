"""`cotenant bench colocate-report`: parts of a grid become one, and what cannot be put together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.colocation import TRAINING, bench, bench_colocate


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


def test_of_a_cell_in_several_files_that_of_the_most_rounds_counts(tmp_path: Path) -> None:
    twice = {**cell("adaptive", 10.0, 40.0), "harvest_of_runs": [0.3, 0.5]}
    first, second = part(100.0, twice, rounds=2), part(100.0, cell("adaptive", 10.0, 20.0), rounds=1)
    paths = [tmp_path / "first.json", tmp_path / "second.json"]
    for order in (paths, paths[::-1]):
        for path, report in zip(paths, (first, second), strict=True):
            path.write_text(json.dumps(report))
        result = bench("colocate-report", *map(str, order), "--json", str(paths[1]))
        assert result.returncode == 0, result.stderr
        assert "1 cell in several files: that of the most rounds counts, or else the last file's" in result.stderr
        (kept,) = json.loads(paths[1].read_text())["cells"]
        assert kept["train_tokens_per_s"] == 40.0
        assert json.loads((tmp_path / "second.json.old").read_text()) == second, "what was read is kept"
        assert "adaptive" in result.stdout


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


def test_a_report_of_measurements_is_not_written_over_them(tmp_path: Path) -> None:
    (tmp_path / "figures.json").write_text("{}")
    result = bench("colocate-report", str(tmp_path / "figures.json"), "--html", str(tmp_path / "figures.json"))
    assert result.returncode == 2
    assert "figures.json is read in this run; name another file" in result.stderr
    assert (tmp_path / "figures.json").read_text() == "{}"
