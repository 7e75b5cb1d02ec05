"""What `cotenant bench colocate` measures where the flags do not say it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cli.colocation import bench_colocate
from cotenant.cli import bench_colocate as command
from cotenant.cli.main import app
from cotenant.core.errors import CotenantError
from cotenant.core.plan import Slo
from small_model import small_model


def test_on_a_cpu_a_few_cells_at_a_target_that_it_can_meet(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    arguments = [*small_model(tmp_path), "--device", "cpu", "--alone-seconds", "0.5", "--json", str(path)]
    result = bench_colocate(*arguments)
    assert result.returncode == 0, result.stderr
    report = json.loads(path.read_text())
    cells = report["cells"]
    assert [(cell["policy"], cell["batch_size"]) for cell in cells] == [
        ("adaptive", 4),
        ("multitask", 4),
        ("inference-only", 4),
    ]
    assert (report["training"]["seq_len"], report["training"]["tokens_per_step"]) == (64, 512)
    (tpot_ms,) = {cell["slo"]["tpot_ms"] for cell in cells}
    assert f"TPOT target: {tpot_ms:g} ms, four times what a step took; --slo-tpot-ms sets others" in result.stderr

    path.write_text(json.dumps({**report, "cells": cells[:2]}))
    again = bench_colocate(*arguments, "--resume")
    assert again.returncode == 0, again.stderr
    assert "TPOT target" not in again.stderr, "it is the one of before"
    resumed = json.loads(path.read_text())["cells"]
    assert resumed[:2] == cells[:2]
    assert [(cell["policy"], cell["slo"]["tpot_ms"]) for cell in resumed[2:]] == [("inference-only", tpot_ms)]


@pytest.mark.parametrize(("limit", "rows"), [(8192, [2048, 4096]), (1000, [1000, 4000])])
def test_on_cuda_the_whole_grid(limit: int, rows: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked: dict[str, Any] = {}

    def grid(loads: Sequence[dict[str, Any]], slos: Sequence[Slo], policies: Sequence[str], *_: object) -> None:
        asked.update(loads=[load["batch_size"] for load in loads], tpots_ms=[slo.tpot_ms for slo in slos])
        asked["policies"] = list(policies)
        raise CotenantError("enough")

    def workload(seq_len: int, tokens_per_step: int, *_: object, **__: object) -> dict[str, Any]:
        return asked.setdefault("rows", [seq_len, tokens_per_step])

    monkeypatch.setattr(command, "Grid", grid)
    monkeypatch.setattr("cotenant.runtime.finetune_workload.Workload", workload)
    result = CliRunner().invoke(app, ["bench", "colocate", *small_model(tmp_path, limit)])
    assert str(result.exception) == "enough"
    assert asked == {
        "loads": [32],
        "tpots_ms": [10, 15, 25, 40],
        "policies": [
            "adaptive", "multitask", "llmstation", "harli", "static", "chunked", "fineinfer", "lifecycle",
            "inference-only",
        ],
        "rows": rows,
    }  # fmt: skip
