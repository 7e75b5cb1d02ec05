"""A job that is paused: what it leaves in memory, and when that is answered."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path

import pytest

from cotenant.core.plan import Mode, Plan
from cotenant.wire.messages import JobCancelled, JobPaused
from runtime.cotenancy import request
from runtime.executor_bench import Bench


def test_a_paused_job_leaves_no_adapter_in_memory(bench: Bench) -> None:
    bench.run(Plan(run_online=False, num_tasklets=1))
    adapter = weakref.ref(bench.training.begin_fused().adapter.parameters()[0])
    gc.disable()
    try:
        bench.pause()
        assert adapter() is None
    finally:
        gc.enable()


def test_a_pause_does_not_wait_for_the_disk_and_is_answered_when_the_checkpoint_is_there(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.run(Plan(run_online=False, until_step_end=True, interruptible=False))
    may_write = threading.Event()
    fsync = os.fsync

    def slow_fsync(descriptor: int) -> None:
        assert may_write.wait(120)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow_fsync)
    job_id = bench.training.job_id
    assert job_id is not None
    bench.training.pause(job_id)
    bench.training.publish()
    assert not any(isinstance(update, JobPaused) for update in bench.updates)
    assert bench.training.view() is None, "no tasklet runs any more"
    bench.engine.add(request("r", [5, 6, 7], 2))
    assert bench.run(Plan(num_tasklets=4, mode=Mode.TEMPORAL)) == 0
    assert [output.request_id for output in bench.emitted] == ["r"], "requests are served meanwhile"
    may_write.set()
    bench.pause()
    assert [update for update in bench.updates if isinstance(update, JobPaused)] == [JobPaused(job_id, 1)]
    assert (tmp_path / "job" / "checkpoints" / "step-00000001").is_dir()


def test_a_cancel_during_a_pause_is_what_is_answered(bench: Bench) -> None:
    bench.run(Plan(run_online=False, until_step_end=True, interruptible=False))
    job_id = bench.training.job_id
    assert job_id is not None
    bench.training.pause(job_id)
    bench.training.cancel(job_id)
    bench.pause()
    answers = [update for update in bench.updates if isinstance(update, JobPaused | JobCancelled)]
    assert answers == [JobCancelled(job_id, 1)]
