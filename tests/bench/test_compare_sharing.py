"""bench/compare_sharing.py on the CPU: the server and PEFT's training side by side without MPS, and each alone; the MPS
daemon's beginning and end with a stand-in for its control program, as the real one needs a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cotenant.runtime.load import Answer, Arrival
from forked import run_command, run_script
from undisturbed import until_undisturbed

ROOT = Path(__file__).parents[2]
TINY = ROOT / "src" / "cotenant" / "assets" / "tiny" / "config.json"
# Answers that take the server long: a client that is held up for as long as one takes reads all of it at once, and no
# time lies between its tokens.
TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.0,20,120
2023-11-16 18:15:46.3,33,1
2023-11-16 18:15:46.4,5000,9
2023-11-16 18:15:46.5,8,160
"""
LOAD = ["--context", "40", "--num-tokens", "100", "--min-requests", "3", "--slo-tpot-ms", "0.01,10000"]
LOAD += ["--slo-ttft-ms", "60000", "--seq-len", "32", "--r", "4", "--alone-seconds", "0.5", "--dtype", "float32"]
TRAINING = ["--tokens-per-step", "64", "--batch-sizes", "1", "--liger", "none", "--no-compile"]
# Torch would have a thread for each core, which wait for each other busily: training would leave the server none.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
CONTROL = """#!/bin/sh
if [ "$1" = -d ]; then
    echo "started with ${CUDA_VISIBLE_DEVICES:-all}" > "$CUDA_MPS_LOG_DIRECTORY/control.log"
    test -n "$REFUSES" && echo "no such luck" && exit 1
    exit 0
fi
read command
echo "$command" >> "$SEEN"
case "$command" in
    get_server_list) echo 17 ;;
    "get_client_list 17") printf '4\\n5\\n' ;;
esac
"""


def run_code(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", *command],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, **environment},
    )


def compare_sharing(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "bench" / "compare_sharing.py"
    return run_script(script, *LOAD, *TRAINING, *arguments, timeout_s=400, environment={**ONE_THREAD, **environment})


@pytest.mark.timeout(900)
def test_two_processes_stand_beside_the_policies(tmp_path: Path) -> None:
    grid, own, trace = tmp_path / "grid.json", tmp_path / "own.json", tmp_path / "trace.csv"
    trace.write_text(TRACE)
    shutil.copy(TINY, tmp_path / "tiny.json")
    load = ["--trace", str(trace), "--device", "cpu"]
    measured = run_command("bench", "colocate", "tiny", *LOAD, *load, "--tokens-per-step", "32",
                   "--batch-sizes", "3", "--policies", "inference-only", "--json", str(grid))  # fmt: skip
    assert measured.returncode == 0, measured.stderr
    theirs = json.loads(grid.read_text())
    # Another part of the trace, which is not measured again.
    other_part = [cell | {"window_s": [60.0, 90.0]} for cell in theirs["cells"] if cell["load"] == "trace"]
    grid.write_text(json.dumps({**theirs, "cells": [*theirs["cells"], *other_part]}))

    load += ["--no-mps", "--config", str(tmp_path / "tiny.json"), "--append-to", str(grid)]
    elsewhere = compare_sharing(*load, "--steady-batch-sizes", "4")
    assert elsewhere.returncode == 1
    assert "has nothing of 4 x 40 at 0.01 ms; 4 x 40 at 10000 ms" in elsewhere.stderr

    def shared(_: int) -> str | None:
        """Measured again, its cells replace those of before."""
        measured = compare_sharing(*load, "--steady-batch-sizes", "3", "--json", str(own))
        assert measured.returncode == 0, measured.stderr + measured.stdout
        for policy in ("separate", "no-mps"):
            assert f"\ntrace (from 0 s) x 1, TPOT target 10000 ms, {policy}: " in measured.stdout
        return check_cells(json.loads(own.read_text()))

    until_undisturbed(shared, num_runs=2)
    report, mine = json.loads(grid.read_text()), json.loads(own.read_text())
    assert (mine["compressed"], theirs["compressed"]) == (False, False), "servers read the weights as that file's do"
    assert report["train_alone_tokens_per_s"] == theirs["train_alone_tokens_per_s"]
    assert report["sharing"]["train_alone_tokens_per_s"] == mine["train_alone_tokens_per_s"]
    cells = [cell for cell in report["cells"] if not cell.get("window_s")]
    places = [(cell["load"], cell["slo"]["tpot_ms"], cell["policy"]) for cell in cells]
    assert places == [
        (kind, tpot_ms, policy)
        for kind in ("steady", "trace")
        for tpot_ms in (0.01, 10000)
        for policy in ("inference-only", "separate", "no-mps")
    ]
    for place in report["comparison"]["places"]:
        if place["place"].get("window_s"):
            continue
        assert place["best_other"] == ("no-mps" if place["place"]["slo"]["tpot_ms"] == 10000 else None)
    assert {path.name for path in (tmp_path / "own-logs").iterdir()} >= {
        "server-separate.log", "server-no-mps.log", "training-no-mps.jsonl", "training-alone-1.log"
    }  # fmt: skip
    page = tmp_path / "grid.html"
    drawn = run_command("bench", "colocate-report", str(grid), "--html", str(page))
    assert drawn.returncode == 0, drawn.stderr
    assert "no-mps: " not in page.read_text(), "nothing is known of it over time"
    assert f"{mine['train_alone_tokens_per_s']:,.0f} tokens/s alone" in page.read_text()


def check_cells(report: dict[str, Any]) -> str | None:
    """Of both ways: measured once, judged for each target. A complaint where answers met a target that is shorter than
    any step, as they do where their tokens came while the client was held up."""
    complaints = []
    alone = report["train_alone_tokens_per_s"]
    assert alone == report["sharing"]["trials"][0]["tokens_per_s"] > 0
    for strict, loose in zip(report["cells"][::2], report["cells"][1::2], strict=True):
        assert (strict["slo"]["tpot_ms"], loose["slo"]["tpot_ms"]) == (0.01, 10000)
        assert strict["itl_ms"] == loose["itl_ms"]
        assert loose["num_requests"] == 3
        assert (loose["num_failed"], loose["attainment"]) == (0, 1.0)
        # A single token has no time between tokens.
        if strict["attainment"] != pytest.approx(0 if strict["load"] == "steady" else 1 / 3, abs=1e-5):
            complaints.append(f"{strict['policy']}, {strict['load']}: attainment {strict['attainment']}")
        assert (strict["ttft_ms"] is None) == (strict["load"] == "steady")
        assert loose["train_tokens_per_s"] == strict["train_tokens_per_s"] > 0
        assert loose["harvest"] == pytest.approx(loose["train_tokens_per_s"] / alone, abs=1e-3)
        if loose["policy"] == "separate":
            assert loose["harvest"] == 1.0
    return "; ".join(complaints) or None


def stand_ins(folder: Path, control: str | None) -> str:
    """A PATH with an nvidia-smi that lists a GPU and perhaps a control program."""
    programs = {"nvidia-smi": "#!/bin/sh\necho 'GPU 0: made up'\n", "nvidia-cuda-mps-control": control}
    for name, text in programs.items():
        if text is not None:
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
    return os.pathsep.join([str(folder), "/usr/bin", "/bin"])


def test_a_server_that_came_to_grief_is_no_way_of_sharing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from compare_sharing import check_answers
    from sharing_processes import SharingError

    log = tmp_path / "server.log"
    log.write_text("torch.AcceleratorError: CUDA error: no such luck\nCompile with more\n\nINFO drained\n")
    arrival = Arrival(0.0, 4, 8)
    fine, failed = Answer(arrival, [0.1]), Answer(arrival, [], "HTTP 500")
    check_answers([fine, failed], log)
    with pytest.raises(
        SharingError, match=r"^2 of 3 .*HTTP 500.*: torch.AcceleratorError: CUDA error: no such luck \("
    ):
        check_answers([fine, failed, failed], log)
    log.write_text("it ends\n")
    with pytest.raises(SharingError, match="it ends"):
        check_answers([failed], log)


def test_a_share_with_wrong_products_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import compare_sharing as script
    from sharing_processes import SharingError

    found = {"80": {"num_sms": 106, "wrong": {"16": 0.0, "64": 0.041, "256": 0.3}}}
    fine, asked = {"num_sms": 132, "wrong": {"16": 0.0, "64": 0.0}}, []

    def products_under(environment: dict[str, str]) -> dict[str, Any]:
        asked.append(environment)
        return found.get(environment.get("share", ""), fine)

    monkeypatch.setattr(script, "products_under", products_under)
    script.check_shares({"the server": {}, "training": {"share": "20"}})
    script.check_shares({"the server": {}, "training": {}})
    assert len(asked) == 3, "what both have is tried once"
    with pytest.raises(SharingError, match=r"^training cannot be right: .* 106 SMs .* with 64, 256 rows, up to 30.0%"):
        script.check_shares({"the server": {}, "training": {"share": "80"}})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_products_are_tried_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from mps import MpsError
    from mps_products import products_under

    with pytest.raises(MpsError, match=r"could not be tried under MPS: .*(NVIDIA|CUDA)"):
        products_under({})


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is an NVIDIA driver here")
def test_without_mps_it_says_what_is_missing(tmp_path: Path) -> None:
    missing = compare_sharing("--json", str(tmp_path / "sharing.json"))
    assert missing.returncode == 1
    assert missing.stderr.strip() == "error: MPS needs an NVIDIA GPU and its driver: there is no nvidia-smi on the PATH"
    without = compare_sharing("--json", str(tmp_path / "sharing.json"), PATH=stand_ins(tmp_path, None))
    assert "there is no nvidia-cuda-mps-control on the PATH" in without.stderr


def test_the_daemon_is_ended_whatever_happens(tmp_path: Path) -> None:
    seen, kept = tmp_path / "seen", tmp_path / "kept"
    script = (
        "import pathlib, sys; from mps import MpsError, running_mps\n"
        "try:\n"
        "    with running_mps(pathlib.Path(sys.argv[1])) as mps:\n"
        "        print(mps.clients(), mps.environment(60)['CUDA_MPS_ACTIVE_THREAD_PERCENTAGE'], mps.pipes)\n"
        "        raise KeyError('in between')\n"
        "except (KeyError, MpsError) as error:\n"
        "    print(error)\n"
    )
    environment = {"PATH": stand_ins(tmp_path, CONTROL), "SEEN": str(seen), "CUDA_VISIBLE_DEVICES": "3"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")])
    ended = run_code(script, str(kept), **environment)
    assert ended.returncode == 0, ended.stderr
    clients, said = ended.stdout.splitlines()
    assert clients.startswith("['4', '5'] 60 ")
    assert said == "'in between'"
    assert not Path(clients.split()[-1]).exists()
    assert seen.read_text().splitlines()[-1].startswith("quit")
    assert (kept / "control.log").read_text() == "started with all\n"

    seen.unlink()
    refused = run_code(script, str(kept), REFUSES="yes", **environment)
    assert refused.stdout == "nvidia-cuda-mps-control -d failed with exit code 1: no such luck\n"
