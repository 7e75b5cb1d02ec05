"""Partitions of the SMs are used when decode steps are captured for all of them, and nobody waits long for that."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from cotenant.core.errors import InvalidInputError
from cotenant.core.plan import Partition
from cotenant.device.cpu.device import CpuDevice
from cotenant.runtime import self_profile
from cotenant.runtime.lanes import LaneCaptures
from cotenant.wire.messages import AddRequest, Drain, Drained, StartJob
from finetune import support
from runtime.cotenancy import request
from runtime.driven_worker import Worker

FEW, MANY = Partition(48, 84), Partition(96, 36)
SIZES = 3  # of batches, that are captured for each


class SplitDevice(CpuDevice):
    """Notes what is captured where."""

    partitions = (FEW, MANY)
    current: Partition | None = None

    def __init__(self) -> None:
        super().__init__()
        self.captured: list[Partition | None] = []

    @contextmanager
    def online(self, partition: Partition | None = None) -> Iterator[None]:
        self.current = partition
        yield
        self.current = None


class LateWorker(Worker):
    """Its partitions are not captured yet."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = SplitDevice()
        super().__init__(folder, self.device, self.device.partitions)
        self.failures: list[Exception] = []  # of the next captures
        monkeypatch.setattr(self.engine, "capture_lane", self._capture)
        self.lanes = LaneCaptures(self.device, self.engine, (MANY,))
        self.loop._lanes = self.lanes
        self.training.wait_for(lambda: self.lanes.done)

    def _capture(self, num_sms: int, *, with_prompts: bool) -> bool:
        if self.failures:
            raise self.failures.pop(0)
        partition, captured = self.device.current, self.device.captured
        assert partition is not None
        assert partition.online_sms == num_sms
        assert with_prompts == (partition == MANY)
        captured.append(partition)
        return captured.count(partition) == SIZES


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_profile, "_QUIET_S", 0.0)


def test_while_nobody_asks_all_are_captured_and_then_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = LateWorker(tmp_path, monkeypatch)
    for count in range(1, 2 * SIZES + 1):
        assert worker.lanes.usable(worker.device.partitions) == ()
        worker.loop.iterate()
        assert len(worker.device.captured) == count, "one in each iteration"
        assert not worker.profile.is_active
    assert worker.device.captured == [FEW] * SIZES + [MANY] * SIZES
    assert worker.lanes.usable(worker.device.partitions) == worker.device.partitions
    worker.iterate_until(lambda: worker.profile.is_active)


def test_requests_do_not_wait_for_partitions_that_nobody_needs_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = LateWorker(tmp_path, monkeypatch)
    worker.loop.iterate()
    assert len(worker.device.captured) == 1
    worker.answer("r")
    assert len(worker.device.captured) == 1


def test_a_job_begins_when_all_are_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = LateWorker(tmp_path, monkeypatch)
    worker.inbox.append(StartJob(support.make_spec(tmp_path / "job")))
    worker.iterate_until(lambda: worker.training.trained_tokens > 0)
    assert worker.device.captured == [FEW] * SIZES + [MANY] * SIZES


def test_where_requests_never_cease_a_job_gets_its_partitions_between_their_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch size at a time, and not in every iteration."""
    worker = LateWorker(tmp_path, monkeypatch)
    worker.inbox.append(StartJob(support.make_spec(tmp_path / "job")))
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    counts = []
    for number in range(2 * SIZES):
        worker.inbox.append(AddRequest(request(f"r{number}", [5, 6, 7], 20)))
        for _ in range(10):
            worker.loop.iterate()
        assert worker.engine.has_work
        counts.append(len(worker.device.captured))
        worker.iterate_until(lambda number=number: len(worker.tokens(f"r{number}")) == 20)  # type: ignore[misc]
        assert len(worker.device.captured) == counts[-1]
        now_s += 10.0
    assert counts == list(range(1, 2 * SIZES + 1))
    worker.iterate_until(lambda: worker.training.trained_tokens > 0)


@pytest.mark.parametrize(
    ("failure", "advice"),
    [(torch.OutOfMemoryError("no room"), "gpu-memory-utilization"), (RuntimeError("the driver says no"), "driver")],
)
def test_where_it_fails_partitions_are_given_up_and_all_else_goes_on(
    failure: Exception, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker, dropped = LateWorker(tmp_path, monkeypatch), []
    monkeypatch.setattr(worker.engine, "drop_lanes", lambda: dropped.append(True))
    worker.loop.iterate()
    worker.failures.append(failure)
    worker.loop.iterate()
    assert advice in caplog.text
    assert dropped
    assert worker.lanes.usable(worker.device.partitions) == ()
    worker.answer("r")
    shape = (1, 256)
    worker.iterate_until(lambda: worker.has_measured(shape))
    assert not any(worker.has_measured(shape, partition) for partition in worker.device.partitions)
    worker.inbox.append(StartJob(support.make_spec(tmp_path / "job")))
    worker.iterate_until(lambda: worker.training.trained_tokens > 0)
    with pytest.raises(InvalidInputError, match="partitions"):
        worker.lanes.finish()


def test_memory_that_is_kept_is_given_back_before_partitions_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = LateWorker(tmp_path, monkeypatch)
    kept = [True]
    monkeypatch.setattr(worker.device, "release_kept_memory", lambda: bool(kept and kept.pop()))
    worker.failures.append(torch.OutOfMemoryError("no room"))
    worker.lanes.finish()
    assert worker.device.captured == [FEW] * SIZES + [MANY] * SIZES


def test_after_a_crash_they_wait_for_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have been its reason."""
    worker = LateWorker(tmp_path, monkeypatch)
    worker.lanes.only_for_jobs = True
    worker.rest()
    assert not worker.device.captured
    assert worker.lanes.reserved_bytes > 0
    worker.inbox.append(StartJob(support.make_spec(tmp_path / "job")))
    worker.iterate_until(lambda: worker.training.trained_tokens > 0)
    assert len(worker.device.captured) == 2 * SIZES
    assert worker.lanes.reserved_bytes == 0


def test_draining_does_not_wait_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = LateWorker(tmp_path, monkeypatch)
    worker.inbox.append(Drain())
    worker.loop.iterate()
    assert Drained() in worker.sent
    assert not worker.device.captured
