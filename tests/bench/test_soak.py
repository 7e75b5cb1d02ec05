"""bench/soak.py against the real server on the built-in model, and on adapters that it makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cotenant.bench.process_memory import resident_bytes, tree
from cotenant.bench.random_adapters import make_adapters
from cotenant.models.registry import model_path
from online import figure_in
from serving import RunningServer, running_server
from undisturbed import until_undisturbed

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("soak")
    flags = ("--slo-ttft-ms", "500", "--slo-tpot-ms", "100", "--num-pages", "512", "--max-model-len", "512")
    with running_server(folder / "data", *flags) as running:
        yield running


def soak(server: RunningServer, folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    path = folder / "soak.json"
    command = [sys.executable, str(ROOT / "bench" / "soak.py"), server.base_url, "--minutes", "0.1"]
    common = ["--sample-seconds", "1", "--pid", str(server.process.pid), "--json", str(path)]
    run = subprocess.run([*command, *common, *arguments], capture_output=True, text=True, timeout=200, check=False)
    assert path.exists(), run.stdout + run.stderr
    return run.returncode, json.loads(path.read_text()), run.stdout


def test_nothing_is_left_after_mixed_load_with_adapters(server: RunningServer, tmp_path: Path) -> None:
    config = str(model_path("tiny") / "config.json")
    code, report, printed = soak(
        server, tmp_path, "--make-adapters", "3", "--config", config, "--rss-bound-mib", "300", "--concurrency", "4"
    )
    assert (code, report["problems"]) == (0, []), printed
    assert "passed" in printed
    requests = report["requests"]
    assert {"stream", "whole", "aborted stream", "adapter loads"} <= set(requests)
    assert "failed" not in requests
    assert report["samples"][-1]["kv_cache_usage_perc"] == 0
    assert max(sample["num_requests_live"] for sample in report["samples"]) > 0
    assert all(sample["rss_bytes"] > 50 * 2**20 for sample in report["samples"])


def test_what_does_not_hold_is_a_reason_and_an_exit_code(server: RunningServer, tmp_path: Path) -> None:
    code, report, printed = soak(
        server, tmp_path, "--rss-bound-mib", "-100000", "--minutes", "0.02", "--sample-seconds", "0.2"
    )
    assert code == 1
    (problem,) = report["problems"]
    assert problem.startswith("memory grew from")
    assert "FAILED: memory grew" in printed


def test_a_run_too_short_to_judge_memory_says_so(server: RunningServer, tmp_path: Path) -> None:
    code, report, _ = soak(server, tmp_path, "--minutes", "0.01", "--sample-seconds", "60")
    assert code == 1
    (problem,) = report["problems"]
    assert "too few to compare" in problem


def test_a_worker_that_died_meanwhile_is_noticed(server: RunningServer, tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    command = [sys.executable, str(ROOT / "bench" / "soak.py"), server.base_url]
    flags = ["--pid", str(server.process.pid), "--rss-bound-mib", "1000", "--json", str(path)]

    def noticed(attempt: int) -> str | None:
        process = subprocess.Popen(
            [*command, "--minutes", str(0.1 * 2**attempt), *flags], stdout=subprocess.PIPE, text=True
        )
        # The load has begun: what comes before sends one at a time.
        while process.poll() is None and _num_live(server) < 2:
            time.sleep(0.01)
        server.kill_worker()
        printed, _ = process.communicate(timeout=120)
        server.wait_ready()
        if process.returncode == 0:
            return "it had come to its end before the worker died"
        assert process.returncode == 1
        assert json.loads(path.read_text())["passed"] is False
        assert "FAILED: processes of the server have ended" in printed
        return None

    until_undisturbed(noticed, num_runs=3)


def _num_live(server: RunningServer) -> float:
    return figure_in(httpx.get(f"{server.base_url}/metrics", timeout=60).text, "num_requests_live")


def test_a_server_that_is_not_there_is_one_line() -> None:
    command = [sys.executable, str(ROOT / "bench" / "soak.py"), "http://127.0.0.1:1", "--pid", "1"]
    run = subprocess.run(
        [*command, "--minutes", "0.01", "--healthy-within", "0.5"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 1
    assert run.stderr.startswith("error: the server at http://127.0.0.1:1 was not healthy")


def test_random_adapters_differ_and_load_in_peft(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folders = make_adapters(tmp_path, model_path("tiny") / "config.json", 2, rank=4, seed=0)
    weights = [(Path(folder) / "adapter_model.safetensors").read_bytes() for folder in folders.values()]
    assert weights[0] != weights[1]
    base = AutoModelForCausalLM.from_pretrained(model_path("tiny"))
    tuned = PeftModel.from_pretrained(base, folders["soak-0"])
    loaded = [name for name, value in tuned.named_parameters() if "lora_B" in name and value.abs().sum() > 0]
    assert len(loaded) == 6 * 7


def test_memory_is_summed_over_a_processs_tree() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(input())'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        assert process.stdin is not None
        own = resident_bytes(process.pid)
        while len(tree(process.pid)) < 2:
            pass
        assert resident_bytes(process.pid) > own / 2 > 0
        assert process.pid in tree(os.getpid())
    finally:
        process.communicate(b"\n")
    assert resident_bytes(process.pid) == 0
    with pytest.raises(ProcessLookupError):
        tree(process.pid)
