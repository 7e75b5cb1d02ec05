"""bench/compare_finetune.py on the CPU: our training beside PEFT's, with a small model and without compilation."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from small_model import CONFIG

ROOT = Path(__file__).parents[2]
UNTIED = {**CONFIG, "tie_word_embeddings": False}
SIZES = ["--seq-len", "32", "--tokens-per-step", "128", "--r", "4", "--dtype", "float32"]
COUNTS = ["--steps", "3", "--warmup-steps", "1"]
# Torch would have a thread for each core, which wait for each other busily, and longest where others are at work too.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "bench" / script), *arguments]
    environment = {**os.environ, **ONE_THREAD}
    return subprocess.run(command, capture_output=True, text=True, timeout=800, check=False, env=environment)


@pytest.mark.timeout(900)
def test_ours_and_peft_stand_in_one_table(tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text(json.dumps(UNTIED))
    results = tmp_path / "results"
    results.mkdir()
    given = ["--config", str(tmp_path / "small.json"), "--json", str(results / "finetune.json"), "--samples", "2"]
    # A module that cannot be imported, whether or not Liger is installed.
    site = tmp_path / "site" / "liger_kernel"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text("raise ImportError('not here')")
    torchtune = tmp_path / "another site" / "torchtune"
    torchtune.mkdir(parents=True)
    (torchtune / "__init__.py").write_text("raise ImportError('not in its own place')")
    chosen = ["--only", "cotenant", "--only", "peft", "--only", "peft, Liger", "--site", str(site.parent)]
    chosen += ["--only", "torchtune", "--torchtune-site", str(torchtune.parent)]
    compared = run("compare_finetune.py", *given, *chosen, *SIZES, *COUNTS, "--batch-sizes", "2,3")
    assert compared.returncode == 0, compared.stderr
    # Four sequences do not go into batches of three: ours leaves a smaller one over, PEFT's script says so.
    assert "peft: failed: peft_finetune.py: error: --tokens-per-step 128 is not a multiple of 96" in compared.stdout
    assert "peft, Liger: skipped: liger_kernel.transformers, peft, transformers cannot be imported" in compared.stdout
    assert "not in its own place" in compared.stdout

    reports = json.loads((results / "finetune.json").read_text())
    sizes = [(report["label"], report["micro_batch_tokens"]) for report in reports]
    assert sizes == [("cotenant", 64), ("cotenant", 96), ("peft", 64)]
    for label in ("cotenant", "peft"):
        speeds = {report["tokens_per_s"]["mean"]: report["best"] for report in reports if report["label"] == label}
        assert [speed for speed, best in speeds.items() if best] == [max(speeds)]
    ours, peft = reports[0], reports[-1]
    for name in ("kind", "model", "dtype", "seq_len", "tokens_per_step", "r", "num_steps"):
        assert peft[name] == ours[name], name
    assert peft["num_micro_batches"] == 2
    # Random weights and tokens: every token is about equally likely.
    assert peft["final_loss"] == pytest.approx(math.log(512), abs=0.3)
    assert 128e3 / peft["step_ms"]["max"] <= peft["tokens_per_s"]["max"] + 1
    assert {"torch", "transformers", "peft"} <= set(peft["versions"])

    page = tmp_path / "page.md"
    rendered = run("render.py", "--results", str(results), "--target", str(page))
    assert rendered.returncode == 0, rendered.stderr
    rows = [line for line in page.read_text().splitlines() if line.startswith("| peft |")]
    (row,) = rows
    assert row.startswith("| peft | 64 | **")
    assert "** | - |" in row
    best = max(report["tokens_per_s"]["mean"] for report in reports if report["label"] == "cotenant")
    assert row.endswith(f"| - | {best / peft['tokens_per_s']['mean']:.3f} |")
    assert "| cotenant | 64 | no |" in page.read_text()
