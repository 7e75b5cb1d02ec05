"""Errors, and memory that lacks: the batch runs, and the job goes on or ends."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
import torch

from cotenant.core.plan import JobView, Mode, Plan
from cotenant.core.tasklet import TaskletKind, TaskletShape, runs_of
from cotenant.finetune.agenda import Agenda
from cotenant.finetune.evaluation import Evaluation
from cotenant.models.lora import LoraAdapter
from cotenant.models.tape import LayerTape
from cotenant.wire.messages import JobFailed
from finetune import support
from runtime.cotenancy import request
from runtime.executor_bench import Bench


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
