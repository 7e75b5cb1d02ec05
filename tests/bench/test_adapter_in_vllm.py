"""bench/adapter_in_vllm.py on the CPU, where vLLM is left out."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from in_process import run_script

ROOT = Path(__file__).parents[2]


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_script(ROOT / "bench" / script, *arguments)


def test_an_exported_adapter_answers_in_peft_as_it_does_here(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    flags = ["--device", "cpu", "--no-vllm", "--steps", "20", "--json", str(results / "adapter.json")]
    compared = run("adapter_in_vllm.py", *flags)
    assert compared.returncode == 0, compared.stderr
    report = json.loads((results / "adapter.json").read_text())
    assert report["num_equal"] == {"cotenant": 12, "peft": 12}
    assert report["num_memorised"] == 12
    assert report["num_as_base"] == 0
    assert report["smallest_margin"] > 1.0
    assert {"torch", "transformers", "peft"} <= set(report["versions"])

    page = tmp_path / "page.md"
    rendered = run("render.py", "--results", str(results), "--target", str(page))
    assert rendered.returncode == 0, rendered.stderr
    assert f"| peft {report['versions']['peft']} | 12 of 12 |" in page.read_text()
    assert "**passed**" in page.read_text()


def test_an_adapter_with_other_ranks_for_some_modules_answers_so_too() -> None:
    compared = run("adapter_in_vllm.py", "--device", "cpu", "--no-vllm", "--patterns", "--steps", "20")
    assert compared.returncode == 0, compared.stderr
    report = json.loads(compared.stdout)
    assert report["num_equal"] == {"cotenant": 12, "peft": 12}
    assert "q_proj" in report["patterns"]["rank_pattern"]


def test_an_adapter_that_changes_nothing_is_a_failure() -> None:
    compared = run("adapter_in_vllm.py", "--device", "cpu", "--no-vllm", "--steps", "1")
    assert compared.returncode == 1
    report = json.loads(compared.stdout)
    assert not report["passed"]
    assert "prompt 0: the adapter changed nothing" in report["problems"]
