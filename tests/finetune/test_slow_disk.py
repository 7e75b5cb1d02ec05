"""Training does not run ahead of a disk that is slower than it: each checkpoint that waits is a copy in memory."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cotenant.device import create_device
from cotenant.finetune.job import TrainingJob
from cotenant.models.decoder import Decoder
from cotenant.runtime.training import TrainingTenant
from cotenant.wire.messages import CheckpointSaved, FromWorker, JobCancelled, JobFailed, JobPaused, JobSucceeded
from finetune import support
from finetune.slow_disk import SlowDisk

SETTINGS = {"batch_size": 1, "n_epochs": 1, "save_steps": 1, "max_steps": 6}


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    return SlowDisk(monkeypatch)


def _run_until_it_waits(job: TrainingJob | TrainingTenant) -> None:
    """For the disk; a copy in memory is over in a moment."""

    def waits_for_copy() -> bool:
        return job.waits_for_copy if isinstance(job, TrainingJob) else job.waits_shortly

    while job.runnable or waits_for_copy():
        if job.runnable:
            job.run_tasklet()
        else:
            time.sleep(0.001)


def _wait_until_it_goes_on(job: TrainingJob) -> None:
    until_s = time.monotonic() + 60
    while not job.runnable:
        assert time.monotonic() < until_s, "the disk has caught up, and the job waits"
        time.sleep(0.001)


@pytest.mark.parametrize("method", ["supervised", "dpo"])
def test_two_checkpoints_wait_at_most(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    settings = {**SETTINGS, "method": method}
    undisturbed = support.make_job(decoder, support.make_spec(tmp_path / "undisturbed", **settings))
    support.run_to_end(undisturbed)
    undisturbed.close()
    disk = SlowDisk(monkeypatch)
    job = support.make_job(decoder, support.make_spec(tmp_path / "slow", **settings))
    for num_written in range(4):
        _run_until_it_waits(job)
        assert job.step == num_written + 2
        assert not job.runnable
        assert job.next_shape is None
        assert job.fusable_layer is None
        assert not job.done
        disk.let_through(1)
        _wait_until_it_goes_on(job)
    _run_until_it_waits(job)
    assert job.step == 6
    disk.let_through()
    updates = support.run_to_end(job)
    job.close()
    assert [update.step for update in updates if isinstance(update, CheckpointSaved)] == [1, 2, 3, 4, 5, 6]
    assert isinstance(updates[-1], JobSucceeded)
    assert support.adapter_bytes(tmp_path / "slow") == support.adapter_bytes(tmp_path / "undisturbed")


def test_steps_that_save_nothing_go_on(decoder: Decoder, tmp_path: Path, disk: SlowDisk) -> None:
    job = support.make_job(decoder, support.make_spec(tmp_path, **{**SETTINGS, "save_steps": 3, "max_steps": 12}))
    _run_until_it_waits(job)
    assert job.step == 8  # the third checkpoint would be the next step's
    disk.let_through()
    support.run_to_end(job)
    job.close()


def test_steps_that_may_be_the_best_wait(decoder: Decoder, tmp_path: Path, disk: SlowDisk) -> None:
    settings = {"batch_size": 1, "learning_rate": 1e-3, "eval_steps": 2, "load_best_model_at_end": True, "max_steps": 8}
    job = support.make_job(decoder, support.make_spec(tmp_path, validation=support.random_examples(4), **settings))
    _run_until_it_waits(job)
    assert job.step == 5  # two better ones were measured before
    disk.let_through()
    support.run_to_end(job)
    job.close()


def _tenant(decoder: Decoder, sent: list[FromWorker]) -> TrainingTenant:
    return TrainingTenant(create_device("cpu"), decoder, None, support.TASKLET_TOKENS, sent.append)


def _go_on(tenant: TrainingTenant) -> None:
    until_s = time.monotonic() + 60
    while tenant.job_id is not None:
        assert time.monotonic() < until_s
        if tenant.runnable:
            tenant.run_tasklet()
        tenant.publish()


@pytest.mark.parametrize("answer", [JobPaused, JobCancelled])
def test_a_job_that_waits_can_be_stopped(
    decoder: Decoder, tmp_path: Path, disk: SlowDisk, answer: type[JobPaused | JobCancelled]
) -> None:
    sent: list[FromWorker] = []
    tenant, spec = _tenant(decoder, sent), support.make_spec(tmp_path, **SETTINGS)
    tenant.start(spec)
    _run_until_it_waits(tenant)
    assert tenant.view() is None
    stop = tenant.pause if answer is JobPaused else tenant.cancel
    stop("ftjob-1")
    tenant.publish()
    assert tenant.job_id is not None, "nothing is on disk yet"
    disk.let_through(2)  # and no other one: the last step has its checkpoint
    _go_on(tenant)
    assert sent[-1] == answer("ftjob-1", 2)
    disk.let_through()
    tenant.start(spec)
    _go_on(tenant)
    assert isinstance(sent[-1], JobSucceeded)


@pytest.mark.parametrize("answer", [JobPaused, JobCancelled, None])
def test_a_job_that_fails_keeps_nobody_waiting_for_the_disk(
    decoder: Decoder, tmp_path: Path, disk: SlowDisk, answer: type[JobPaused | JobCancelled] | None
) -> None:
    """Who stops it meanwhile is answered, too."""
    sent: list[FromWorker] = []
    tenant = _tenant(decoder, sent)
    tenant.start(support.make_spec(tmp_path, **SETTINGS))
    _run_until_it_waits(tenant)
    tenant.fail(RuntimeError("it is broken"))
    tenant.publish()
    assert (tenant.job_id, tenant.runnable, tenant.view()) == ("ftjob-1", False, None), "nothing is on disk yet"
    assert not [message for message in sent if isinstance(message, CheckpointSaved | JobFailed)]
    if answer is not None:
        (tenant.pause if answer is JobPaused else tenant.cancel)("ftjob-1")
        assert tenant.job_id is not None, "nor has it waited for that"
    disk.let_through()
    _go_on(tenant)
    told = [message for message in sent if isinstance(message, CheckpointSaved | JobFailed | JobPaused | JobCancelled)]
    last = [] if answer is None else [answer]
    assert [type(message) for message in told] == [CheckpointSaved, CheckpointSaved, JobFailed, *last]


def test_a_job_that_waits_for_a_full_disk_fails(decoder: Decoder, tmp_path: Path, disk: SlowDisk) -> None:
    sent: list[FromWorker] = []
    tenant = _tenant(decoder, sent)
    tenant.start(support.make_spec(tmp_path, **SETTINGS))
    _run_until_it_waits(tenant)
    disk.is_full = True
    disk.let_through()
    _go_on(tenant)
    assert isinstance(sent[-1], JobFailed)
    assert (sent[-1].code, sent[-1].step) == ("disk_full", 2)
