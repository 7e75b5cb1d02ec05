"""One job behind another in the training tenant."""

from __future__ import annotations

import errno
import itertools
import math
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cotenant.core.job import StepMetrics
from cotenant.core.job_layout import CHECKPOINTS_FOLDER
from cotenant.core.plan import Plan
from cotenant.device.cpu.device import CpuDevice
from cotenant.finetune.job import TrainingJob
from cotenant.finetune.metrics import MetricsLog
from cotenant.finetune.preparation import Prepared, prepare
from cotenant.finetune.state import TrainingState
from cotenant.runtime import training as training_module
from cotenant.wire.messages import CheckpointSaved, JobFailed, JobStarted, JobSucceeded
from finetune import support
from runtime.executor_bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_shortages_of_one_job_are_not_counted_for_the_next(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run_short(num_times: int) -> None:
        bench.run_short(monkeypatch, [True] * num_times)
        bench.run(Plan(run_online=False, num_tasklets=num_times, interruptible=False))

    run_short(8)
    bench.pause()
    bench.training.start(support.make_spec(tmp_path / "next"))
    run_short(1)
    assert bench.training.job_id is not None
    assert not [update for update in bench.updates if isinstance(update, JobFailed)]
    bench.pause()


def test_who_comes_while_a_job_ends_waits_for_all_of_its_writes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that failed is told by itself, after those before it."""
    job, numbers = bench.training._job, itertools.count()
    assert job is not None
    write, begun = job._files._checkpoints.write, threading.Event()

    def write_the_first(*args: object) -> object:
        begun.set()
        if next(numbers) > 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args)

    monkeypatch.setattr(job._files._checkpoints, "write", write_the_first)
    while job.step < 5:  # the end of an epoch
        bench.training.run_tasklet()
    assert begun.wait(60)
    while job.step < 6:
        bench.training.run_tasklet()
    bench.training.cancel("ftjob-1")
    bench.training.prepare(replace(support.make_spec(tmp_path / "next"), job_id="ftjob-2"))
    told = [update for update in bench.updates if isinstance(update, CheckpointSaved | JobFailed)]
    assert [(type(update), update.job_id) for update in told] == [(CheckpointSaved, "ftjob-1"), (JobFailed, "ftjob-1")]
    assert bench.training.job_id == "ftjob-2"


def test_a_job_begins_when_nothing_is_left_of_the_one_before(tmp_path: Path) -> None:
    """What captured graphs hold is no memory that it could have."""

    class WithGraphs(CpuDevice):
        num_left = 0

        @property
        def has_retired(self) -> bool:
            return self.num_left > 0

        def destroy_retired(self, most_s: float = math.inf) -> None:
            self.num_left = max(0, self.num_left - 1)

    device = WithGraphs()
    bench = Bench(tmp_path, device)
    bench.pause()
    device.num_left = 3
    bench.training.prepare(replace(support.make_spec(tmp_path / "next"), job_id="ftjob-2"))
    deadline_s, num_tidied = time.monotonic() + 60, 0
    while bench.training.is_preparing:
        assert time.monotonic() < deadline_s
        bench.training.tidy()
        num_tidied += 1
        bench.training.start_prepared()
    assert num_tidied >= 3
    assert bench.training.runnable
    bench.pause()


def test_a_job_that_finds_no_memory_begins_again_with_nothing_on_the_device(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What its files had become there may be what lacks."""
    bench.pause()
    tried: list[Prepared] = []
    released: list[int] = []

    def make(*arguments: Any, prepared: Prepared, **options: Any) -> TrainingJob:
        tried.append(prepared)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("no memory")
        return TrainingJob(*arguments, prepared=prepared, **options)

    monkeypatch.setattr(training_module, "TrainingJob", make)
    monkeypatch.setattr(Prepared, "on_cpu", lambda prepared: replace(prepared, fingerprint="from the CPU"))
    monkeypatch.setattr(bench.training._device, "release_kept_memory", lambda: bool(released.append(len(tried))))
    bench.training.start(support.make_spec(tmp_path / "next"))
    assert [prepared.fingerprint == "from the CPU" for prepared in tried] == [False, True]
    assert released == [1]
    bench.training.run_tasklet()
    assert bench.training.job_id is not None


def test_what_a_job_begins_with_is_on_the_disk_before_it_begins(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The loop does not wait for a disk, which may be slow."""
    threads: list[str] = []
    keep = MetricsLog.keep

    def kept(log: MetricsLog, num_steps: int) -> list[StepMetrics]:
        threads.append(threading.current_thread().name)
        return keep(log, num_steps)

    monkeypatch.setattr(MetricsLog, "keep", kept)
    bench.pause()
    bench.training.start(support.make_spec(tmp_path / "next"))
    assert bench.training.job_id is not None
    assert [name.rpartition("_")[0] for name in threads] == ["job-preparer"]


def test_for_a_job_that_is_no_longer_wanted_nothing_is_laid_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It was cancelled while its files were read."""
    asked, may_go_on = threading.Event(), threading.Event()
    laid_out = list[str]()

    def prepare_late(*arguments: Any) -> Prepared | None:
        asked.set()
        assert may_go_on.wait(60)
        return prepare(*arguments)

    monkeypatch.setattr(training_module, "prepare", prepare_late)
    monkeypatch.setattr(training_module, "lay_out", lambda prepared, *_: laid_out.append("one"))
    bench.pause()
    bench.training.prepare(support.make_spec(tmp_path / "next"))
    assert asked.wait(60)
    bench.training.cancel("ftjob-1")
    assert bench.training.job_id is None
    shutil.rmtree(tmp_path / "next")  # as whoever has cancelled it may delete it
    may_go_on.set()
    bench.training.close()
    assert not laid_out
    assert not (tmp_path / "next").exists()


def test_what_a_job_trains_is_laid_out_beside_the_loop(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where there is room for it; where not, the job says so as it begins."""
    threads: list[str] = []
    make = TrainingState.__init__

    def made(*arguments: Any) -> None:
        threads.append(threading.current_thread().name)
        make(*arguments)

    monkeypatch.setattr(TrainingState, "__init__", made)
    bench.pause()
    bench.training.start(support.make_spec(tmp_path / "next"))
    assert [name.rpartition("_")[0] for name in threads] == ["job-preparer"]
    bench.pause()
    threads.clear()
    monkeypatch.setattr(bench.training._device, "memory_bytes", lambda: (0, 1 << 10))
    bench.training.start(replace(support.make_spec(tmp_path / "other"), job_id="ftjob-2"))
    assert not threads
    (failed,) = [update for update in bench.updates if isinstance(update, JobFailed)]
    assert (failed.job_id, failed.code) == ("ftjob-2", "insufficient_memory")


def test_the_loop_reads_nothing_as_a_job_is_taken_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench.pause()
    spec = support.make_spec(tmp_path / "next", save_steps=1)
    bench.training.start(spec)
    while not [update for update in bench.updates if isinstance(update, CheckpointSaved)]:
        if bench.training.runnable:
            bench.training.run_tasklet()
        bench.training.publish()
    bench.pause()
    saved = [update for update in bench.updates if isinstance(update, CheckpointSaved)]
    del bench.updates[:]
    bench.training.prepare(spec)
    preparation = bench.training._preparation
    assert preparation is not None
    assert preparation.result.result(60) is not None

    def fail(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EIO, "the disk is not there", str(path))

    with monkeypatch.context() as patch:
        for name in ("open", "read_bytes", "read_text", "iterdir", "glob", "stat", "is_file", "is_dir", "mkdir"):
            patch.setattr(Path, name, fail)
        bench.training.start_prepared()
    assert bench.training.runnable
    assert isinstance(bench.updates[0], JobStarted)
    assert [update for update in bench.updates if isinstance(update, CheckpointSaved)] == saved
    bench.pause()


def test_a_finished_job_whose_checkpoints_cannot_be_read_fails_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench.pause()
    spec = support.make_spec(tmp_path / "next", save_steps=1, max_steps=2)
    bench.training.start(spec)
    while bench.training.job_id is not None:
        if bench.training.runnable:
            bench.training.run_tasklet()
        bench.training.publish()
    assert isinstance(bench.updates[-1], JobSucceeded)
    iterdir = Path.iterdir

    def fail(path: Path) -> Iterator[Path]:
        if path.name == CHECKPOINTS_FOLDER:
            raise OSError(errno.EIO, "the disk is not there", str(path))
        return iterdir(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", fail)
        bench.training.start(spec)
    assert isinstance(bench.updates[-1], JobFailed)
    assert bench.training.job_id is None
    bench.training.start(spec)
    assert isinstance(bench.updates[-1], JobSucceeded)
