"""Requests are answered while a job waits for the disk or its file is read, and it can be stopped meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cotenant.models.tensors_in_memory import read_tensors
from cotenant.runtime.training import TrainingTenant
from cotenant.wire.messages import (
    AddRequest,
    CancelJob,
    Drain,
    Drained,
    FromWorker,
    JobCancelled,
    JobFailed,
    JobMetrics,
    JobPaused,
    JobStarted,
    JobSucceeded,
    Outputs,
    PauseJob,
    StartJob,
    ToWorker,
)
from finetune import support
from finetune.slow_disk import SlowDisk
from runtime.cotenancy import request
from runtime.driven_loop import A_MOMENT_S, Channel, iterate_until_answered, small_loop

pytestmark = pytest.mark.usefixtures("loop_clock")


class SlowDiskChannel(Channel):
    """Each wait while the job waits for the disk lets a checkpoint through to it; the server ends once the job has."""

    def __init__(self, disk: SlowDisk, *messages: ToWorker) -> None:
        super().__init__(*messages)
        self._disk = disk
        self.training: TrainingTenant | None = None
        self.num_steps: list[int] = []  # reported before each of these waits

    def wait(self, timeout_s: float) -> bool:
        self.num_looks_before_wait = 0
        time.sleep(A_MOMENT_S)
        assert self.training is not None
        if self.training.waits_shortly or self.training.runnable:  # until it is prepared, or copied, or since it is
            return False
        self.num_steps.append(sum(len(sent.steps) for sent in self.sent if isinstance(sent, JobMetrics)))
        self._disk.let_through(1)
        if any(isinstance(sent, JobSucceeded) for sent in self.sent):
            self.inbox.append(Drain())
        return bool(self.inbox)


def test_the_loop_rests_while_the_job_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = support.make_spec(tmp_path / "job", batch_size=1, n_epochs=1, save_steps=1, max_steps=6)
    channel = SlowDiskChannel(SlowDisk(monkeypatch), StartJob(spec), AddRequest(request("r", [5, 6, 7], 20)))
    loop, _ = small_loop(tmp_path, channel, "adaptive")
    channel.training = loop._training
    loop.run()
    assert channel.num_steps[0] == 2
    assert channel.num_steps[-1] == 6
    tokens = [output.request_id for sent in channel.sent if isinstance(sent, Outputs) for output in sent.outputs]
    assert tokens.count("r") == 20


class SlowFile:
    """A job whose training file says nothing before ``feed``: whoever reads it until then waits."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spec = support.make_spec(folder, n_epochs=1)
        self.is_read = threading.Event()
        self._may_read = threading.Semaphore(0)
        monkeypatch.setattr("cotenant.finetune.dataset.read_tensors", self._wait_and_read)

    def feed(self) -> None:
        """To the one who reads or the next who will."""
        self._may_read.release()

    def _wait_and_read(self, path: Path) -> dict[str, torch.Tensor]:
        self.is_read.set()
        self._may_read.acquire(timeout=20)  # a loop that reads the file itself fails the test, late
        return read_tensors(path)


def kinds(channel: Channel) -> set[type[FromWorker]]:
    return {type(message) for message in channel.sent}


@pytest.mark.parametrize("is_good", [True, False])
def test_requests_are_answered_while_a_jobs_file_is_read(
    is_good: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = SlowFile(tmp_path / "job", monkeypatch)
    if not is_good:
        Path(job.spec.dataset_path).write_bytes(b"nothing")
    channel = Channel(StartJob(job.spec), AddRequest(request("r", [5, 6, 7], 10)))
    loop, _ = small_loop(tmp_path, channel, "adaptive")
    iterate_until_answered(loop, channel, "r")
    assert not kinds(channel) & {JobStarted, JobFailed}
    job.feed()
    loop.run()
    codes = [message.code for message in channel.sent if isinstance(message, JobFailed)]
    assert codes == ([] if is_good else ["invalid_training_file"])
    assert (kinds(channel) >= {JobStarted, JobSucceeded}) == is_good
    assert isinstance(channel.sent[-1], Drained)


@pytest.mark.parametrize(
    ("message", "answer"),
    [(PauseJob, JobPaused), (CancelJob, JobCancelled), (Drain, JobPaused)],
    ids=["pause", "cancel", "drain"],
)
def test_a_job_whose_file_is_being_read_can_be_stopped(
    message: Callable[..., ToWorker], answer: type[FromWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = SlowFile(tmp_path / "job", monkeypatch)
    channel = Channel(StartJob(job.spec), StartJob(job.spec))  # said twice
    loop, _ = small_loop(tmp_path, channel, "adaptive")
    for _ in range(3):
        loop.iterate()
    assert job.is_read.wait(20)
    channel.inbox.append(Drain() if message is Drain else message(job.spec.job_id))
    loop.iterate()
    assert answer in kinds(channel)
    assert not kinds(channel) & {JobStarted, JobFailed}
    assert (Drained in kinds(channel)) == (message is Drain)
    job.feed()
    if message is Drain:
        return
    channel.inbox = [StartJob(job.spec), AddRequest(request("r", [5, 6, 7], 10))]  # no job begins after a Drain
    iterate_until_answered(loop, channel, "r")
    assert JobStarted not in kinds(channel), "the file is read again"
    job.feed()
    loop.run()
    assert {JobStarted, JobSucceeded} <= kinds(channel)


def test_no_job_begins_once_the_worker_drains(tmp_path: Path) -> None:
    runs = support.make_spec(tmp_path / "job")
    late = replace(support.make_spec(tmp_path / "late"), job_id="ftjob-2")
    channel = Channel(Drain(), StartJob(late), StartJob(runs), AddRequest(request("r", [5, 6, 7], 10)))
    loop, _ = small_loop(tmp_path, channel, "adaptive", with_job=True)
    loop.run()
    told = JobStarted | JobPaused | JobFailed | JobSucceeded
    jobs = [(type(message), message.job_id) for message in channel.sent if isinstance(message, told)]
    assert jobs == [(JobStarted, runs.job_id), (JobPaused, late.job_id), (JobPaused, runs.job_id)]
    assert isinstance(channel.sent[-1], Drained)
