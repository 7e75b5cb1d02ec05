"""What a plan says is what is run, and an arrival waits for at most the tasklet in flight."""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch

from cotenant.config import BatchConfig, LoraConfig
from cotenant.core.plan import JobView, Mode, Plan
from cotenant.core.request import SequenceOutput
from cotenant.core.tasklet import TaskletKind, TaskletShape, runs_of
from cotenant.device import Device, create_device
from cotenant.device.cpu.device import CpuDevice
from cotenant.engine.engine import OnlineEngine
from cotenant.finetune.agenda import Agenda
from cotenant.finetune.evaluation import Evaluation
from cotenant.finetune.job import TrainingJob
from cotenant.models.lora import LoraAdapter
from cotenant.models.tape import LayerTape
from cotenant.runtime.device_time import DeviceTime
from cotenant.runtime.executor import Executor
from cotenant.runtime.trace import Trace
from cotenant.runtime.training import TrainingTenant
from cotenant.wire.messages import FromWorker, JobCancelled, JobFailed, JobPaused
from finetune import support
from finetune.conftest import save_llama
from runtime.cotenancy import request


class Bench:
    """One engine, one job, one executor."""

    def __init__(
        self,
        folder: Path,
        device: Device | None = None,
        validation: support.Examples | None = None,
        trace: Trace | None = None,
    ) -> None:
        save_llama(folder / "model")
        decoder = support.load(folder / "model")
        device = device or create_device("cpu")
        self.engine = OnlineEngine(decoder, 64, 4, BatchConfig(8, 64), 128, LoraConfig(), (), device=device)
        self.updates: list[FromWorker] = []
        self.now_s = 0.0
        self.training = TrainingTenant(
            device, decoder, None, support.TASKLET_TOKENS, self.updates.append, clock=lambda: self.now_s
        )
        self.training.start(support.make_spec(folder / "job", validation=validation, eval_steps=1 if validation else 0))
        self.executor = Executor(device, decoder, self.engine, self.training, trace)
        self.emitted: list[SequenceOutput] = []

    def pause(self) -> None:
        """Stop the job and wait until that is answered."""
        self.training.pause_running()
        deadline_s = time.monotonic() + 120
        while self.training.job_id is not None:
            self.training.publish()
            assert time.monotonic() < deadline_s

    def run_short(self, monkeypatch: pytest.MonkeyPatch, are_short: Iterable[bool]) -> TrainingJob:
        """Let the job's next tasklets find no memory where that is said; the job."""
        job, each = self.training._job, iter(are_short)
        assert job is not None
        run_tasklet = job.run_tasklet

        def run_or_fail() -> TaskletShape:
            if next(each, False):
                raise torch.OutOfMemoryError("no memory")
            return run_tasklet()

        monkeypatch.setattr(job, "run_tasklet", run_or_fail)
        return job

    def run(self, plan: Plan, looks_before_arrival: int = 1_000_000) -> int:
        """Execute the plan; a request 'arrives' after so many looks. Returns the tasklets that ran."""
        looks = iter(range(looks_before_arrival))
        record = self.executor.execute(plan, self.emitted.extend, lambda: next(looks, None) is None)
        return sum(run.count for run, _ in record.tasklets) + (record.fused.count if record.fused else 0)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.pause()


@pytest.mark.parametrize("before", [0, 1, 5])
def test_no_tasklet_starts_once_a_request_has_arrived(bench: Bench, before: int) -> None:
    plan = Plan(run_online=False, num_tasklets=12, mode=Mode.TEMPORAL)
    assert bench.run(plan, looks_before_arrival=before) == before


@pytest.mark.parametrize(("hold_ms", "count"), [(0.0, 0), (1e6, 4)])
def test_tasklets_behind_a_batch_may_keep_a_request_waiting_for_a_while(
    bench: Bench, hold_ms: float, count: int
) -> None:
    bench.engine.add(request("r", [5, 6, 7], 3))
    plan = Plan(num_tasklets=4, mode=Mode.TEMPORAL, hold_ms=hold_ms)
    assert bench.run(plan, looks_before_arrival=0) == count


@pytest.mark.parametrize(("predicted_ms", "least", "most"), [(None, 10, 10), (1e6, 10, 10), (100.0, 1, 6)])
def test_no_tasklet_behind_a_batch_begins_later_than_was_planned(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, predicted_ms: float | None, least: int, most: int
) -> None:
    """Each takes 20 ms, of which the plan knows nothing."""
    job = bench.training._job
    assert job is not None
    run_tasklet = job.run_tasklet

    def run_slowly() -> TaskletShape:
        time.sleep(0.02)
        return run_tasklet()

    monkeypatch.setattr(job, "run_tasklet", run_slowly)
    bench.engine.add(request("r", [5, 6, 7], 3))
    assert least <= bench.run(Plan(num_tasklets=10, mode=Mode.TEMPORAL, predicted_ms=predicted_ms)) <= most


def test_a_plan_that_cannot_be_interrupted_runs_to_its_end(bench: Bench) -> None:
    plan = Plan(run_online=False, num_tasklets=5, interruptible=False, mode=Mode.TEMPORAL)
    assert bench.run(plan, looks_before_arrival=0) == 5


def test_a_whole_step_ends_with_its_optimizer_tasklet(bench: Bench) -> None:
    view = bench.training.view()
    assert view is not None
    wanted = view.num_left
    assert bench.run(Plan(run_online=False, until_step_end=True, interruptible=False)) == wanted
    after = bench.training.view()
    assert after is not None
    assert after.next_shape.kind is TaskletKind.FORWARD, "the next step begins"


def test_tokens_leave_before_the_tasklets_beside_their_batch_start(bench: Bench) -> None:
    bench.engine.add(request("r", [5, 6, 7], 4))
    seen_at_first_look: list[int] = []

    def look() -> bool:
        seen_at_first_look.append(len(bench.emitted))
        return False

    bench.executor.execute(Plan(num_tasklets=2, mode=Mode.TEMPORAL), bench.emitted.extend, look)
    assert seen_at_first_look[0] == 1


def test_fused_tasklets_count_against_the_plan(bench: Bench) -> None:
    bench.engine.add(request("r", [5, 6, 7], 4))
    assert bench.run(Plan(num_tasklets=2, num_fused=2, mode=Mode.FUSED)) == 2
    assert bench.run(Plan(num_tasklets=3, num_fused=1, mode=Mode.FUSED)) == 3


def test_the_devices_time_of_a_fused_batch_is_that_of_all_its_layers(bench: Bench) -> None:
    bench.engine.add(request("r", [5] * 40, 60))
    bench.run(Plan())
    time_of = bench.executor.device_time = DeviceTime()
    shares: list[float] = []  # of what the host measures
    for _ in range(48):
        before_ms = time_of.decode_shared_ms
        plan = Plan(num_tasklets=2, num_fused=2, mode=Mode.FUSED)
        record = bench.executor.execute(plan, bench.emitted.extend, lambda: False)
        if record.fused:
            shares.append((time_of.decode_shared_ms - before_ms) / record.online_ms)
    assert max(shares) <= 1.0
    assert statistics.median(shares) > 0.7, "a machine that is busy may hold some of them up"
    assert time_of.decode_alone_ms > 0, "where the next tasklet was no forward"


def test_without_a_job_a_plan_for_tasklets_is_only_the_online_batch(bench: Bench) -> None:
    bench.pause()
    bench.engine.add(request("r", [5, 6, 7], 1))
    assert bench.run(Plan(num_tasklets=4, mode=Mode.TEMPORAL)) == 0
    assert [output.request_id for output in bench.emitted] == ["r"]


def test_an_error_in_a_fused_layer_ends_the_job_and_not_the_batch(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_fused(output: torch.Tensor, tape: LayerTape) -> None:
        raise ValueError("a bug")

    bench.engine.add(request("r", [5, 6, 7], 2))
    monkeypatch.setattr(bench.training, "end_fused", end_fused)
    assert bench.run(Plan(num_tasklets=2, num_fused=2, mode=Mode.FUSED)) == 0
    assert [output.request_id for output in bench.emitted] == ["r"]
    assert isinstance(bench.updates[-1], JobFailed)
    assert bench.training.job_id is None


@pytest.mark.parametrize(("num_short", "goes_on"), [(3, True), (9, False)])
def test_fused_layers_that_find_no_memory_begin_their_micro_batch_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, num_short: int, goes_on: bool
) -> None:
    end_fused, failures = bench.training.end_fused, iter([True] * num_short)

    def short_of_memory(output: torch.Tensor, tape: LayerTape) -> None:
        if next(failures, False):
            raise torch.OutOfMemoryError("no room")
        end_fused(output, tape)

    bench.engine.add(request("r", [5, 6, 7], 30))
    monkeypatch.setattr(bench.training, "end_fused", short_of_memory)
    fused = Plan(num_tasklets=2, num_fused=2, mode=Mode.FUSED)
    for _ in range(num_short):
        assert bench.run(fused, looks_before_arrival=0) == 0, "nor do any run behind the batch"
    assert sum(len(output.token_ids) for output in bench.emitted) == num_short, "answers go on"
    if goes_on:
        assert bench.run(fused, looks_before_arrival=0) == 2
    else:
        assert [update.code for update in bench.updates if isinstance(update, JobFailed)] == ["out_of_memory"]


def no_room_on_the_cpu() -> RuntimeError:
    """As torch says it."""
    with pytest.raises(RuntimeError) as found:
        torch.empty(1 << 60, dtype=torch.uint8)
    return found.value


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), no_room_on_the_cpu()])
def test_an_error_at_a_jobs_start_ends_the_job_alone(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def trainable(*args: object, **kwargs: object) -> None:
        raise error

    bench.pause()
    monkeypatch.setattr(LoraAdapter, "trainable", trainable)
    bench.training.start(support.make_spec(tmp_path / "other"))
    failure = bench.updates[-1]
    assert isinstance(failure, JobFailed)
    assert failure.code == "out_of_memory"


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


def test_a_batch_that_finds_no_memory_takes_it_from_the_step_in_flight(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench.pause()
    short = support.random_examples(18, longest=10)
    bench.training.start(support.make_spec(tmp_path / "short", short, batch_size=9))
    before = bench.training.view()
    assert before is not None
    bench.run(Plan(run_online=False, num_tasklets=3, mode=Mode.TEMPORAL))
    bench.engine.add(request("r", [5, 6, 7], 2))
    decoder = bench.engine._decoder
    forward, failures = decoder.forward, iter([True])

    def short_of_memory(*arguments: object) -> torch.Tensor:
        if next(failures, False):
            raise torch.OutOfMemoryError("no memory")
        return forward(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(decoder, "forward", short_of_memory)
    bench.run(Plan())
    assert [output.request_id for output in bench.emitted] == ["r"]
    view = bench.training.view()
    assert view is not None, "the job goes on"
    assert view.upcoming[0].num_tasklets == 3, "from the beginning of its step"
    assert _largest(view) < _largest(before), "and with less memory"
    bench.now_s += 3600
    bench.training.publish()
    bench.run(Plan(run_online=False, until_step_end=True, interruptible=False))
    later = bench.training.view()
    assert later is not None
    assert _largest(later) > _largest(view), "until it has not been short for a while"


def _largest(view: JobView) -> int:
    """Tokens of the largest micro-batch in the step."""
    return max(run.shape.num_tokens for run in runs_of(view.upcoming) if run.shape.kind is TaskletKind.FORWARD)


def test_a_tasklet_that_finds_no_memory_begins_its_micro_batch_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = bench.run_short(monkeypatch, [False, False, True, True])
    bench.run(Plan(run_online=False, until_step_end=True, interruptible=False))
    assert job.step == 1
    assert not [update for update in bench.updates if isinstance(update, JobFailed)]


def test_a_job_that_never_finds_memory_fails(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.run_short(monkeypatch, itertools.repeat(True))
    bench.run(Plan(run_online=False, until_step_end=True, interruptible=False))
    assert [update.code for update in bench.updates if isinstance(update, JobFailed)] == ["out_of_memory"]


@pytest.mark.parametrize(("owner", "name", "succeeds"), [(Agenda, "step", 1), (Evaluation, "add_to", 0)])
def test_what_is_done_once_and_finds_no_memory_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, succeeds: int
) -> None:
    """An evaluation that has ended was reported, its sums were taken: no tasklet is left that could be run again."""
    attempts, run = itertools.count(), getattr(owner, name)

    def short_of_memory(*args: object) -> object:
        if next(attempts) == succeeds:
            raise torch.OutOfMemoryError("no memory")
        return run(*args)

    monkeypatch.setattr(owner, name, short_of_memory)
    bench = Bench(tmp_path, validation=support.random_examples(6, seed=5))
    deadline_s = time.monotonic() + 120
    while bench.training.job_id is not None:
        assert time.monotonic() < deadline_s, "it neither goes on nor fails"
        bench.run(Plan(run_online=False, num_tasklets=4))
        bench.training.publish()
    assert [update.code for update in bench.updates if isinstance(update, JobFailed)] == ["out_of_memory"]


def test_an_optimizer_that_finds_no_memory_ends_the_job(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have begun to change the state of training."""
    job = bench.training._job
    assert job is not None
    run_tasklet = job.run_tasklet

    def short_of_memory() -> TaskletShape:
        shape = job.next_shape
        if shape is not None and shape.kind is TaskletKind.OPTIMIZER:
            raise torch.OutOfMemoryError("no memory")
        return run_tasklet()

    monkeypatch.setattr(job, "run_tasklet", short_of_memory)
    bench.run(Plan(run_online=False, until_step_end=True, interruptible=False))
    assert [update.code for update in bench.updates if isinstance(update, JobFailed)] == ["out_of_memory"]


class AheadDevice(CpuDevice):
    """A CPU that is asked for what a device behind the host is; notes what was launched behind batches, and whether
    that waited."""

    overlaps = True

    def __init__(self) -> None:
        super().__init__()
        self.behind: list[tuple[TaskletKind, bool]] = []
        self.next_waits: Callable[[], bool] = lambda: False

    def run_tasklet(self, launch: Callable[[], TaskletShape], *, behind_online: bool = False) -> None:
        def noted() -> TaskletShape:
            waits = self.next_waits()
            shape = launch()
            if behind_online:
                self.behind.append((shape.kind, waits))
            return shape

        super().run_tasklet(noted, behind_online=behind_online)


def test_nothing_that_waits_for_the_device_is_launched_behind_a_batch(tmp_path: Path) -> None:
    """The host would wait for the batch within the launch, and its tokens would wait for the tasklet."""
    device = AheadDevice()
    bench = Bench(tmp_path, device, validation=support.random_examples(6, seed=5))
    device.next_waits = lambda: bench.training.next_waits
    bench.engine.add(request("r", [5, 6, 7], 60))
    for _ in range(50):
        bench.run(Plan(num_tasklets=1, mode=Mode.TEMPORAL))
    kinds = {kind for kind, _ in device.behind}
    assert {TaskletKind.FORWARD, TaskletKind.BACKWARD, TaskletKind.EVAL_FORWARD, TaskletKind.EVAL_LOSS} <= kinds
    assert TaskletKind.OPTIMIZER not in kinds
    assert not any(waits for _, waits in device.behind)
    assert sum(len(output.token_ids) for output in bench.emitted) == 50
    bench.pause()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), ValueError("a bug")])
def test_what_came_to_nothing_is_no_tasklet_that_was_measured(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    job = bench.training._job
    assert job is not None
    run_tasklet, shapes, fails = job.run_tasklet, list[TaskletShape](), iter([False, False, True])

    def failing() -> TaskletShape:
        if next(fails, False):
            raise error
        return run_tasklet()

    monkeypatch.setattr(job, "run_tasklet", failing)
    for _ in range(6):
        if bench.training.runnable:
            plan = Plan(run_online=False, num_tasklets=1, mode=Mode.TEMPORAL)
            record = bench.executor.execute(plan, bench.emitted.extend, lambda: False)
            shapes += [run.shape for run, _ in record.tasklets]
    assert len(shapes) == (5 if isinstance(error, torch.OutOfMemoryError) else 2)
    assert all(shape.num_tokens for shape in shapes)
