"""Where memory is short the passes that keep nothing, validation's and DPO's reference's, get smaller as well."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from cotenant.core.errors import CotenantError
from cotenant.core.job import StepMetrics
from cotenant.core.tasklet import TaskletKind, runs_of
from cotenant.device import create_device
from cotenant.finetune import tasklets
from cotenant.finetune.job import TrainingJob
from cotenant.finetune.metrics import MetricsLog
from cotenant.models.decoder import Decoder
from cotenant.runtime.training import TrainingTenant
from cotenant.wire.messages import FromWorker, JobSucceeded
from finetune import support

TASKLET_TOKENS = 256
METHODS = {"supervised": {"batch_size": 10}, "dpo": {"method": "dpo", "batch_size": 5}}
# Without room for a whole micro-batch: not even a pair of the longest examples is as long.
MOST_TOKENS = 80


def _figures(folder: Path) -> list[tuple[float, ...]]:
    def figures(step: StepMetrics) -> tuple[float, ...]:
        measured = [step.train_loss, step.valid_loss, step.full_valid_loss]
        for preference in (step.preference, step.valid_preference, step.full_valid_preference):
            measured += [preference.margins, preference.logps_chosen] if preference is not None else []
        return tuple(figure for figure in measured if figure is not None)

    return [figures(step) for step in MetricsLog(folder / "metrics.jsonl").read()]


def _spec(folder: Path, method: str) -> Any:
    examples = support.random_examples(40)
    settings = {"max_steps": 6, "eval_steps": 1, **METHODS[method]}
    return support.make_spec(folder, examples, support.random_examples(30, seed=5), **settings)


def _undisturbed(decoder: Decoder, folder: Path, method: str) -> list[tuple[float, ...]]:
    job = TrainingJob(decoder, _spec(folder, method), TASKLET_TOKENS, None)
    support.run_to_end(job)
    job.close()
    return _figures(folder)


@pytest.mark.parametrize("method", METHODS)
def test_forward_passes_are_cut_at_any_moment(decoder: Decoder, tmp_path: Path, method: str) -> None:
    expected = _undisturbed(decoder, tmp_path / "undisturbed", method)
    job = TrainingJob(decoder, _spec(tmp_path / "disturbed", method), TASKLET_TOKENS, None)
    generator, lent, num_cuts = random.Random(3), 0, 0
    while not job.done:
        if job.upcoming():
            support.run(job, min(generator.randint(1, 9), sum(cycle.num_tasklets for cycle in job.upcoming())))
        else:
            job.wait_for_writes()
        if lent:
            job.release(lent)
            lent = 0
        elif job.upcoming() and generator.random() < 0.8:
            widest = _widest(job)
            while job.max_tokens > MOST_TOKENS:
                lent += job.require(job.left_bytes // 8)
            assert _widest(job) <= MOST_TOKENS
            num_cuts += widest > MOST_TOKENS
        job.take_updates()
    job.close()
    assert num_cuts > 3
    for found, wanted in zip(_figures(tmp_path / "disturbed"), expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-5)


def _widest(job: TrainingJob) -> int:
    """Tokens of the largest forward pass that is upcoming and keeps nothing."""
    runs = runs_of(job.upcoming())
    return max((run.shape.num_tokens for run in runs if run.shape.kind is TaskletKind.EVAL_FORWARD), default=0)


@pytest.mark.parametrize("method", METHODS)
def test_a_job_goes_on_in_less_memory_whichever_pass_finds_none(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A device that has no room for a pass of more than so many tokens, whatever it was believed to have."""
    expected = _undisturbed(decoder, tmp_path / "undisturbed", method)

    def limit(owner: Any) -> None:
        forward = owner.forward

        def limited(self: Any, *arguments: Any) -> None:
            if self.micro_batch.batch.num_tokens > MOST_TOKENS:
                raise torch.OutOfMemoryError("there is no room")
            forward(self, *arguments)

        monkeypatch.setattr(owner, "forward", limited)

    limit(tasklets.TrainingPass)
    limit(tasklets.EvaluationPass)
    sent: list[FromWorker] = []
    tenant = TrainingTenant(create_device("cpu"), decoder, None, TASKLET_TOKENS, sent.append)
    tenant.start(_spec(tmp_path / "short", method))
    while tenant.job_id is not None:
        if tenant.runnable:
            tenant.run_tasklet()
        tenant.publish()
    assert isinstance(sent[-1], JobSucceeded), sent[-1]
    for found, wanted in zip(_figures(tmp_path / "short"), expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-5)


def _needed_bytes(decoder: Decoder, spec: Any) -> int:
    with pytest.raises(CotenantError) as refused:
        TrainingJob(decoder, spec, TASKLET_TOKENS, None, free_bytes=1000)
    assert refused.value.code == "insufficient_memory"
    return int(re.findall(r"needs (\d+) bytes", refused.value.message)[0])


@pytest.mark.parametrize("method", METHODS)
def test_a_long_validation_example_without_room_is_told_before_the_start(
    decoder: Decoder, tmp_path: Path, method: str
) -> None:
    """It is no part of what is trained on, and has to pass in one piece all the same."""
    examples = support.random_examples(20)
    settings = {"max_length": 120, "max_steps": 1, **METHODS[method]}
    alone = support.make_spec(tmp_path / "alone", examples, **settings)
    longest = [([5] * 119 + [last], [0.0] + [1.0] * 119) for last in (5, 6)]
    spec = support.make_spec(tmp_path / "job", examples, [*longest, *support.random_examples(8, seed=5)], **settings)
    needed = _needed_bytes(decoder, spec)
    assert needed > _needed_bytes(decoder, alone)
    with pytest.raises(CotenantError, match=rf"\({120 if method == 'supervised' else 240} in the validation file\)"):
        TrainingJob(decoder, spec, TASKLET_TOKENS, None, free_bytes=needed - 1)
    job = TrainingJob(decoder, spec, TASKLET_TOKENS, None, free_bytes=needed)
    assert isinstance(support.run_to_end(job)[-1], JobSucceeded)
    job.close()


@pytest.mark.parametrize("method", METHODS)
def test_with_little_memory_validation_is_cut_from_the_start(decoder: Decoder, tmp_path: Path, method: str) -> None:
    spec = _spec(tmp_path / "tight", method)
    job = TrainingJob(decoder, spec, TASKLET_TOKENS, None, free_bytes=_needed_bytes(decoder, spec))
    assert job.max_tokens < TASKLET_TOKENS
    assert 0 < _widest(job) <= job.max_tokens
    job.close()


@pytest.mark.parametrize("method", METHODS)
def test_where_memory_is_tight_there_is_still_some_to_give(decoder: Decoder, tmp_path: Path, method: str) -> None:
    """However much micro-batches would take that there is no room for anyway."""
    spec = _spec(tmp_path / "tight", method)
    job = TrainingJob(decoder, spec, 1 << 14, None, free_bytes=_needed_bytes(decoder, spec))
    assert job.require(job.left_bytes // 4) > 0
    job.close()
