"""What jobs do for the first time is done before them, while nobody waits for that, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from clocks import SteppedTime
from cotenant.device import create_device
from cotenant.finetune.trainer import Trainer
from cotenant.finetune.warm_up import warm_up
from cotenant.runtime import rehearsal as rehearsal_module
from cotenant.runtime.rehearsal import Rehearsal
from cotenant.wire.messages import AddRequest, JobMetrics, JobSucceeded, StartJob
from finetune import support
from runtime.cotenancy import request
from runtime.driven_worker import Worker


class RehearsingWorker(Worker):
    """It rehearses, on a CPU. ``seen``: of each of its tasklets, whether it was the rehearsal's."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = create_device("cpu")
        super().__init__(folder, self.device)
        self.profile.begin = lambda: False  # type: ignore[method-assign]
        self.is_compiled = True
        self.seen: list[bool] = []
        self.on_tasklet: Callable[[], None] = lambda: None
        self.rehearsal = Rehearsal(
            self.device, self.decoder, support.TASKLET_TOKENS, lambda: self.is_compiled, lambda: None
        )
        self.loop._rehearsal = self.rehearsal
        self.training.wait_for(lambda: self.rehearsal.done)
        run = Trainer.run_tasklet

        def noted(trainer: Trainer) -> object:
            self.seen.append(not self.rehearsal.done)
            self.on_tasklet()
            return run(trainer)

        monkeypatch.setattr(Trainer, "run_tasklet", noted)


def _losses(worker: Worker, folder: Path) -> list[float]:
    worker.inbox.append(StartJob(support.make_spec(folder)))
    worker.iterate_until(lambda: any(isinstance(message, JobSucceeded) for message in worker.sent))
    steps = [step for message in worker.sent if isinstance(message, JobMetrics) for step in message.steps]
    return [step.train_loss for step in steps]


def test_in_idle_time_and_a_job_learns_what_it_would_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _losses(Worker(tmp_path / "without", create_device("cpu")), tmp_path / "first")
    worker = RehearsingWorker(tmp_path / "with", monkeypatch)
    state = torch.get_rng_state()
    worker.rest()
    assert worker.rehearsal.done
    assert len(worker.seen) > 10
    assert torch.equal(torch.get_rng_state(), state)
    assert worker.training.trained_tokens == 0
    assert not worker.sent or not any(isinstance(message, JobMetrics) for message in worker.sent)
    assert _losses(worker, tmp_path / "second") == expected
    assert worker.seen == sorted(worker.seen, reverse=True)


def test_nothing_is_rehearsed_before_kernels_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = RehearsingWorker(tmp_path, monkeypatch)
    worker.is_compiled = False
    worker.inbox.append(StartJob(support.make_spec(tmp_path / "job")))
    worker.rest()
    assert not worker.seen
    worker.is_compiled = True
    worker.iterate_until(lambda: worker.training.trained_tokens > 0)
    assert worker.seen[0]


def test_requests_do_not_wait_for_it_while_there_is_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = RehearsingWorker(tmp_path, monkeypatch)
    worker.loop.iterate()
    num_steps = len(worker.seen)
    worker.answer("r")
    assert len(worker.seen) == num_steps


def test_where_requests_never_cease_it_keeps_them_waiting_for_a_fifth_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of the test: a tasklet takes 10 ms, an iteration 4 ms."""
    worker, time = RehearsingWorker(tmp_path, monkeypatch), SteppedTime(monkeypatch, rehearsal_module)
    worker.on_tasklet = lambda: time.sleep(0.01)
    worker.inbox.append(StartJob(support.make_spec(tmp_path / "job")))
    worker.inbox.append(AddRequest(request("r", [5, 6, 7], 400)))
    begin_s = time.now_s
    while not worker.rehearsal.done:
        worker.loop.iterate()
        assert worker.engine.has_work
        time.sleep(4e-3)
    num_tasklets = len(worker.seen)
    assert num_tasklets > 10
    assert 0.18 < num_tasklets * 0.01 / (time.now_s - begin_s) < 0.23
    worker.iterate_until(lambda: worker.training.trained_tokens > 0)


@pytest.mark.parametrize("is_at_once", [True, False])
def test_if_it_fails_jobs_run_without(
    is_at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = RehearsingWorker(tmp_path, monkeypatch)
    closed = []
    close = Trainer.close
    monkeypatch.setattr(Trainer, "close", lambda trainer: (closed.append(trainer), close(trainer)))
    if not is_at_once:
        for _ in range(5):
            worker.loop.iterate()
    with monkeypatch.context() as patch:
        target = "run_tasklet" if not is_at_once else "start"
        patch.setattr(Trainer, target, lambda trainer: (_ for _ in ()).throw(torch.OutOfMemoryError("no room")))
        worker.rest()
    assert worker.rehearsal.done
    assert len(closed) == 1
    assert "no room" in caplog.text
    worker.inbox.append(StartJob(support.make_spec(tmp_path / "job")))
    worker.iterate_until(lambda: worker.training.trained_tokens > 0)


def test_after_a_crash_it_waits_for_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = RehearsingWorker(tmp_path, monkeypatch)
    worker.rehearsal.only_for_jobs = True
    worker.rest()
    assert not worker.seen
    worker.inbox.append(StartJob(support.make_spec(tmp_path / "job")))
    worker.iterate_until(lambda: worker.training.trained_tokens > 0)
    assert worker.seen[0]


def test_full_rows_are_planned_last_and_never_beside_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes a GPU; here it is noted alone."""
    planned: list[tuple[tuple[int, ...], bool]] = []
    monkeypatch.setattr(rehearsal_module, "can_capture", lambda decoder: True)
    monkeypatch.setattr(
        rehearsal_module, "attend", lambda decoder, lengths, backward=True: planned.append((lengths, backward))
    )
    worker = RehearsingWorker(tmp_path, monkeypatch)
    worker.iterate_until(lambda: worker.rehearsal.done)
    assert not planned
    assert not worker.rehearsal.is_wanted(has_job=True, delays_requests=False)
    assert not worker.rehearsal.is_wanted(has_job=False, delays_requests=True)
    worker.rest()
    assert planned == [((support.TASKLET_TOKENS,), False), ((support.TASKLET_TOKENS,), True)]
    assert not worker.rehearsal.is_wanted(has_job=False, delays_requests=False)


def test_warming_up_never_keeps_a_server_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a device that cannot do anything."""
    decoder = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, spec=None)
    monkeypatch.setattr(torch, "zeros", _only_on_cpu(torch.zeros))
    warm_up(decoder)  # type: ignore[arg-type]
    assert "no device" in caplog.text


def _only_on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*shape: int, device: torch.device | None = None, **options: object) -> torch.Tensor:
        if device is not None and device.type == "cuda":
            raise RuntimeError("no device")
        return make(*shape, device=device, **options)

    return made
