"""`cotenant profile` on a small model, and on the built-in one where a message names it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cotenant.cli.main import app
from cotenant.cli.options import build_config
from cotenant.config import CoExecutionConfig, ServerConfig
from cotenant.core.errors import ConflictError, InvalidInputError
from cotenant.runtime.colocate_bench import ColocateBench, Profiled
from cotenant.runtime.tenants import build_tenants
from cotenant.store import lock_folder, open_store
from forked import run_command
from small_model import small_model
from undisturbed import until_undisturbed

ALONE = ["--alone-seconds", "0.5"]  # each of its tasklets is measured many times in it


def run_profile(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("profile", *arguments)


def test_what_was_measured_is_kept_and_adds_up(tmp_path: Path) -> None:
    flags = [*small_model(tmp_path), "--device", "cpu", "--contexts", "64"]
    folder = tmp_path

    def measured(attempt: int) -> str | None:
        nonlocal folder
        folder = tmp_path / f"data-{attempt}"
        result = run_profile("--batch-sizes", "2", *flags, *ALONE, "--data-dir", str(folder))
        assert result.returncode == 0, result.stderr
        (line,) = (each for each in result.stdout.splitlines() if "sequence" in each)
        said = re.fullmatch(
            r"2 sequences of about 64 tokens: (\S+) ms a step alone, (\S+) ms with (\S+) tasklets of training beside "
            "it",
            line,
        )
        assert said is not None, line
        alone_ms, beside_ms, num_tasklets = map(float, said.groups())
        assert alone_ms > 0
        assert num_tasklets > 0
        first = json.loads(latencies_of(folder).read_text())
        kinds = {shape[0] for _, shape, *_ in first["records"]}
        assert {"batch", "tasklet", "beside"} <= kinds
        assert f"{len(first['records'])} latencies in " in result.stdout
        longest_ms = max(record[2] for record in first["records"] if record[1][0] == "tasklet")
        # On a CPU one thing at a time runs. Tasklets of the optimizer are longer.
        if 0 < (beside_ms - alone_ms) / num_tasklets < 3 * longest_ms:
            return None
        return f"{line}, of at most {longest_ms:.2f} ms"

    until_undisturbed(measured)
    path = latencies_of(folder)
    # The same sizes of a model, whatever its folder is called.
    small = [str(Path(flags[0]).rename(tmp_path / "elsewhere")), *flags[1:], "--data-dir", str(folder)]
    again = run_profile("--batch-sizes", "1,3,4000", *small, *ALONE, "--contexts", "64,100000")
    assert again.returncode == 0, again.stderr
    assert "are more: 1 x 100000, 3 x 100000, 4000 x 64, 4000 x 100000" in again.stderr
    assert "1 sequence of about 64 tokens: " in again.stdout
    sizes = {shape[1][0] for _, shape, *_ in json.loads(path.read_text())["records"] if shape[0] == "batch"}
    assert {2, 3} <= sizes, "what was measured before is still there"
    open_store(folder).close()  # the folder is a server's again


def latencies_of(folder: Path) -> Path:
    (path,) = (folder / "latencies").iterdir()
    return path


def test_tasklets_are_no_longer_than_a_jobs(tmp_path: Path) -> None:
    flags = [*small_model(tmp_path), "--device", "cpu", "--contexts", "64", "--data-dir", str(tmp_path)]
    result = run_profile("--batch-sizes", "1", *flags, *ALONE, "--tasklet-tokens", "32")
    assert result.returncode == 0, result.stderr
    (path,) = (tmp_path / "latencies").iterdir()
    tasklets = [shape[1] for _, shape, *_ in json.loads(path.read_text())["records"] if shape[0] == "tasklet"]
    assert {"forward", "backward", "loss"} <= {kind for kind, *_ in tasklets}
    assert max(num_tokens for _, num_tokens, *_ in tasklets) <= 32


@pytest.mark.parametrize("is_eager", [False, True])
def test_a_server_finds_what_was_profiled_with_its_flags(tmp_path: Path, is_eager: bool) -> None:
    model = small_model(tmp_path)
    flags = [*model, "--device", "cpu", "--contexts", "64", "--data-dir", str(tmp_path)]
    result = run_profile("--batch-sizes", "1", *flags, *ALONE, *(["--enforce-eager"] if is_eager else []))
    assert result.returncode == 0, result.stderr

    def num_found(*, enforce_eager: bool) -> int:
        given = {"device": "cpu", "load_format": "dummy", "data_dir": str(tmp_path), "enforce_eager": enforce_eager}
        tenants = build_tenants(build_config(model[0], given, None), lambda _: None)
        return tenants.latencies.load(tenants.predictor)

    assert num_found(enforce_eager=is_eager) > 0
    assert num_found(enforce_eager=not is_eager) == 0


def test_a_folder_that_a_server_uses_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    store = open_store(folder)
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    result = run_profile(*small_model(tmp_path), "--device", "cpu", "--data-dir", str(folder))
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith(f"error: The data folder {folder} is in use by a server (process {os.getpid()}). Stop it, ")
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    assert not (folder / "latencies").exists()
    store.close()


@pytest.mark.parametrize(
    ("folder", "complaint"),
    [
        ("/proc/x", "nothing can be written in /proc: "),
        ("{0}/file/data", "{0}/file is not a folder"),
        ("{0}/data", "{0}/data/latencies is not a folder"),
    ],
)
def test_a_folder_that_cannot_be_written_is_named_before_anything_is_measured(
    tmp_path: Path, folder: str, complaint: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "latencies").touch()
    result = run_profile(*small_model(tmp_path), "--device", "cpu", "--data-dir", folder.format(tmp_path))
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith(f"error: --data-dir: {complaint.format(tmp_path)}")


def test_what_cannot_be_kept_in_the_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = ColocateBench.alone

    def in_the_way(self: ColocateBench, duration_s: float) -> float:
        assert (tmp_path / "data" / "LOCK").exists()
        (tmp_path / "data" / "latencies").touch()
        return measure(self, duration_s)

    monkeypatch.setattr(ColocateBench, "alone", in_the_way)
    flags = ["--device", "cpu", "--batch-sizes", "1", "--contexts", "64", "--data-dir", str(tmp_path / "data")]
    result = CliRunner().invoke(app, ["profile", *small_model(tmp_path), *flags, *ALONE])
    assert result.exit_code == 1
    assert "latencies in" not in result.stdout
    line = result.stderr.strip().splitlines()[-1]  # the log may say before that there is nothing to read
    assert line.startswith(f"error: --data-dir: latencies cannot be kept in {tmp_path / 'data'}: ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_was_measured_before_an_interruption_is_kept(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, asked = ColocateBench.profile, list[int]()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def interrupted(self: ColocateBench, room_ms: float, batch_size: int, context: int, num_tokens: int) -> Profiled:
        asked.append(batch_size)
        if batch_size == 2:
            if number is signal.SIGINT:  # which a program in the background ignores
                raise KeyboardInterrupt
            os.kill(os.getpid(), number)
        return measure(self, room_ms, batch_size, context, num_tokens)

    monkeypatch.setattr(ColocateBench, "profile", interrupted)
    flags = ["--device", "cpu", "--batch-sizes", "1,2,3", "--contexts", "64", "--data-dir", str(tmp_path)]
    result = CliRunner().invoke(app, ["profile", *small_model(tmp_path), *flags, *ALONE])
    assert (result.exit_code, asked) == (130, [1, 2])
    assert result.stderr.strip().splitlines()[-1] == "error: interrupted: what was measured so far is kept"
    (path,) = (tmp_path / "latencies").iterdir()
    sizes = {shape[1][0] for _, shape, *_ in json.loads(path.read_text())["records"] if shape[0] == "batch"}
    assert 1 in sizes
    assert not list(tmp_path.glob("cotenant-bench-*"))
    open_store(tmp_path).close()  # the folder is a server's again


def test_partitions_are_those_of_the_servers_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[CoExecutionConfig]()

    def noted(self: ColocateBench, config: ServerConfig, *_: Any, **__: Any) -> None:
        asked.append(config.coexecution)
        raise InvalidInputError("enough")

    monkeypatch.setattr(ColocateBench, "__init__", noted)
    flags = ["--device", "cpu", "--contexts", "64", "--data-dir", str(tmp_path)]
    for more in ([], ["--policy", "harli"], ["--sm-shares", "0.5", "--sm-shares", "0.25"]):
        CliRunner().invoke(app, ["profile", *small_model(tmp_path), *flags, *more])
    assert [(each.policy, each.sm_shares) for each in asked] == [
        ("adaptive", None), ("harli", None), ("adaptive", (0.5, 0.25))
    ]  # fmt: skip


def test_a_server_is_told_that_its_folder_is_profiled(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path, "`cotenant profile`")
    with pytest.raises(ConflictError, match=r"in use by `cotenant profile` \(process \d+\)\. Stop it"):
        open_store(tmp_path)
    lock.release()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["tiny", "--batch-sizes", "1,x"], "--batch-sizes: expected numbers like 1,8,32"),
        (["tiny", "--contexts", "4096"], "tiny takes 1024 tokens, and the shortest of these take up to 4702 with"),
        (["tiny", "--batch-sizes", "9000"], "error: --batch-sizes, --contexts: tiny takes 1024 tokens"),
        (["tiny", "--policy", "inference-only"], "--policy: under inference-only nothing trains"),
        (["tiny", "--policy", "best"], "error: --policy: must be one of adaptive, "),
        (["tiny", "--data-dir", ""], "error: --data-dir: is empty; leave it out for cotenant-data"),
        (["tiny", "--sm-shares", "1.5"], "error: --sm-shares: must be above 0 and below 1"),
        (["no-such-model"], "unknown model 'no-such-model'"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], complaint: str) -> None:
    result = run_profile(*arguments)
    assert result.returncode == 2
    assert complaint in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
