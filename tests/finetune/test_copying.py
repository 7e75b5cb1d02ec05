"""A checkpoint is copied while training goes on, up to what would change it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from cotenant.core.job_layout import TENSOR_FILE
from cotenant.core.tasklet import TaskletKind
from cotenant.finetune.checkpoint import Snapshot
from cotenant.finetune.job import TrainingJob
from cotenant.finetune.state import StateCopier
from cotenant.models.decoder import Decoder
from finetune import support


class SlowCopies:
    """Copies begin when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_begin = threading.Event()
        self._run: Callable[[StateCopier], Snapshot] = StateCopier.run
        monkeypatch.setattr(StateCopier, "run", lambda copier: self._wait_and_run(copier))

    def _wait_and_run(self, copier: StateCopier) -> Snapshot:
        assert self.may_begin.wait(60)
        return self._run(copier)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> SlowCopies:
    return SlowCopies(monkeypatch)


def _job(decoder: Decoder, folder: Path, **changes: object) -> TrainingJob:
    return support.make_job(decoder, support.make_spec(folder, save_steps=1, **changes))


def _masters(job: TrainingJob) -> dict[str, torch.Tensor]:
    assert job._training is not None
    return {name: weight.detach().clone() for name, weight in job._training.state.adapter.named_parameters().items()}


def _stored(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "checkpoints" / f"step-{step:08d}" / TENSOR_FILE)


def test_training_goes_on_to_the_next_optimizer_step(decoder: Decoder, tmp_path: Path, copies: SlowCopies) -> None:
    job = _job(decoder, tmp_path)
    support.run_step(job)
    masters = _masters(job)
    num_tasklets = 0
    while job.runnable:
        assert job.next_shape is not None
        assert job.next_shape.kind is not TaskletKind.OPTIMIZER
        job.run_tasklet()
        num_tasklets += 1
    assert num_tasklets > 3
    assert (job.waits_for_copy, job.upcoming(), job.step) == (True, (), 1)
    copies.may_begin.set()
    job.wait_for_writes()
    assert not job.waits_for_copy
    support.run_step(job)
    job.wait_for_writes()
    first, second = _stored(tmp_path, 1), _stored(tmp_path, 2)
    assert all(torch.equal(first[f"master.{name}"], weight) for name, weight in masters.items())
    assert any(not torch.equal(second[f"master.{name}"], weight) for name, weight in masters.items())
    assert len(first) == 3 * len(masters)
    job.close()


def test_an_optimizer_that_is_run_all_the_same_waits(decoder: Decoder, tmp_path: Path, copies: SlowCopies) -> None:
    job = _job(decoder, tmp_path)
    support.run_step(job)
    masters = _masters(job)
    while job.runnable:
        job.run_tasklet()
    optimizer = threading.Thread(target=job.run_tasklet)
    optimizer.start()
    optimizer.join(0.2)
    assert optimizer.is_alive()
    copies.may_begin.set()
    optimizer.join()
    job.wait_for_writes()
    assert job.step == 2
    stored = _stored(tmp_path, 1)
    assert all(torch.equal(stored[f"master.{name}"], weight) for name, weight in masters.items())
    job.close()


def test_a_pause_has_its_checkpoint_when_the_copy_is_there(
    decoder: Decoder, tmp_path: Path, copies: SlowCopies
) -> None:
    spec = support.make_spec(tmp_path, n_epochs=2)
    job = support.make_job(decoder, spec)
    support.run_step(job)
    job.begin_checkpoint()
    masters = _masters(job)
    assert job.writing
    copies.may_begin.set()
    job.wait_for_writes()
    job.take_updates()
    assert not job.writing
    job.close()
    again = support.make_job(decoder, spec)
    assert again.step == 1
    assert all(torch.equal(weight, masters[name]) for name, weight in _masters(again).items())
    again.close()


def test_where_a_copy_finds_no_memory_the_job_fails_and_does_not_wait_for_ever(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(copier: StateCopier) -> Snapshot:
        raise MemoryError("no memory for a copy")

    job = _job(decoder, tmp_path)
    monkeypatch.setattr(StateCopier, "run", fail)
    updates = support.run_to_end(job)
    assert "no memory for a copy" in str(updates[-1])
    assert job.step < job.total_steps
    job.close()
