"""A job that is killed, or stopped and taken up again, ends with the same bytes as one that was left alone."""

from __future__ import annotations

import random
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest

import forked
from cotenant.core.errors import ConflictError
from cotenant.core.job import Hyperparameters
from cotenant.core.tasklet import TaskletKind
from cotenant.finetune.captured import BACKWARD_PARTS, FORWARD_PARTS, RECOMPUTE_PARTS
from cotenant.finetune.job import TrainingJob
from cotenant.finetune.metrics import MetricsLog
from cotenant.models.decoder import Decoder
from cotenant.wire.messages import CheckpointSaved, JobMetrics, JobStarted, JobSucceeded
from finetune import run_job, support
from finetune.undisturbed_jobs import VALIDATION, undisturbed_job

PATTERNS = {"rank_pattern": {"q_proj": 3, "down_proj": 7}, "alpha_pattern": {"up_proj": 3.0}, "use_rslora": True}
DPO = {"method": "dpo", "batch_size": 3, "lora_dropout": 0.1}
# Of captured layers, which a CPU does not have, and of those that are recomputed, which few jobs have.
PARTS = {*FORWARD_PARTS, *RECOMPUTE_PARTS, *BACKWARD_PARTS, TaskletKind.RECOMPUTE}


def _assert_same_result(folder: Path, reference: Path, num_steps: int) -> None:
    assert support.adapter_bytes(folder) == support.adapter_bytes(reference)
    assert (folder / "metrics.jsonl").read_bytes() == (reference / "metrics.jsonl").read_bytes()
    steps = MetricsLog(folder / "metrics.jsonl").read()
    assert [step.step for step in steps] == list(range(1, num_steps + 1))
    assert not list(folder.rglob(".tmp-*"))


@pytest.mark.parametrize("method", run_job.CHANGES)
def test_killed_at_random_moments(decoder: Decoder, model_folder: Path, tmp_path: Path, method: str) -> None:
    reference = undisturbed_job(decoder, tmp_path / "reference", **run_job.CHANGES[method])
    killed = tmp_path / "killed"
    support.make_spec(killed, validation=VALIDATION)
    generator = random.Random(4)
    processes = forked.context()
    resumed_steps = []
    for num_steps in (3, 5, 2, 4, 3, 100):  # how far to let it go before the kill; at last to the end
        steps, theirs = processes.Pipe(duplex=False)
        ends = num_steps == 100
        process = processes.Process(target=run_job.main, args=(model_folder, killed, method, theirs, ends))
        process.start()
        theirs.close()
        resumed_steps.append(steps.recv())
        with suppress(EOFError):
            for _ in range(num_steps):
                steps.recv()
            while not list(killed.glob("checkpoints/step-*")):  # so that the next has something to take up
                steps.recv()
        if not ends:
            time.sleep(generator.uniform(0.0, 0.02))
            process.kill()
        process.join()
    assert process.exitcode == 0
    assert sum(step > 0 for step in resumed_steps) >= 3, "the kills came too early to test anything"
    _assert_same_result(killed, tmp_path / "reference", reference.total_steps)


@dataclass(frozen=True)
class _Undisturbed:
    """A job that was left alone."""

    changes: dict[str, object]
    folder: Path
    total_steps: int


@pytest.fixture(scope="module", params=[PATTERNS, DPO], ids=["supervised", "dpo"])
def undisturbed(
    decoder: Decoder, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> _Undisturbed:
    changes = {"eval_steps": 2, "save_steps": 3, **request.param}
    folder = tmp_path_factory.mktemp("undisturbed")
    return _Undisturbed(changes, folder, undisturbed_job(decoder, folder, **changes).total_steps)


@pytest.mark.parametrize("kind", [*(kind for kind in TaskletKind if kind not in PARTS), None])
def test_paused_before_any_kind_of_tasklet(
    decoder: Decoder, undisturbed: _Undisturbed, tmp_path: Path, kind: TaskletKind | None
) -> None:
    """None: at the end, when there is nothing left to run."""
    spec = support.make_spec(tmp_path, validation=VALIDATION, **undisturbed.changes)
    num_pauses = 0
    for _ in range(4):
        job = support.make_job(decoder, spec)
        for _ in range(40):
            if job.upcoming():
                job.run_tasklet()
        job.wait_for_writes()
        while job.upcoming() and job.next_shape.kind is not kind:
            job.run_tasklet()
            job.wait_for_writes()
        num_pauses += bool(job.upcoming())
        job.checkpoint()
        job.close()
    assert (num_pauses > 0) == (kind is not None)
    job = support.make_job(decoder, spec)
    support.run_to_end(job)
    job.close()
    _assert_same_result(tmp_path, undisturbed.folder, undisturbed.total_steps)


def test_a_pause_right_after_the_start_needs_no_checkpoint(decoder: Decoder, tmp_path: Path) -> None:
    job = support.make_job(decoder, support.make_spec(tmp_path))
    support.run(job, 2)
    assert job.checkpoint() == []
    job.close()
    job = support.make_job(decoder, support.make_spec(tmp_path))
    assert job.step == 0
    job.close()


def test_resumed_job_reports_what_the_store_does_not_have(decoder: Decoder, tmp_path: Path) -> None:
    spec = support.make_spec(tmp_path)
    job = support.make_job(decoder, spec)
    for _ in range(7):
        support.run_step(job)
    job.checkpoint()
    trained_tokens = job.trained_tokens
    job.close()
    spec = support.make_spec(tmp_path, recorded_step=4)
    job = support.make_job(decoder, spec)
    started, metrics, *checkpoints = job.start_updates()
    assert started == JobStarted("ftjob-1", 10, 7, job.order.mean_step_tokens)
    assert isinstance(metrics, JobMetrics)
    assert [step.step for step in metrics.steps] == [5, 6, 7]
    assert metrics.trained_tokens == job.trained_tokens == trained_tokens
    assert [type(update) for update in checkpoints] == [CheckpointSaved]
    job.close()


def test_a_finished_job_has_nothing_to_run(decoder: Decoder, tmp_path: Path) -> None:
    reference = undisturbed_job(decoder, tmp_path)
    (tmp_path / "train.safetensors").unlink()  # it isn't needed any more
    job = TrainingJob(decoder, _finished_spec(tmp_path), support.TASKLET_TOKENS, None)
    assert job.done
    assert job.finished_path == str(tmp_path / "adapter")
    assert job.upcoming() == ()
    assert job.fusable_layer is None
    started, metrics, *rest = job.start_updates()
    assert isinstance(started, JobStarted)
    assert (started.total_steps, started.resumed_step) == (10, 10)
    assert isinstance(metrics, JobMetrics)
    assert len(metrics.steps) == 10
    assert [type(update) for update in rest] == [CheckpointSaved, CheckpointSaved, JobSucceeded]
    assert rest[-1] == JobSucceeded("ftjob-1", job.finished_path, reference.trained_tokens, 10)
    assert job.checkpoint() == []
    job.close()


def _finished_spec(folder: Path) -> object:
    shutil.copyfile(folder / "valid.safetensors", folder / "train.safetensors")
    spec = support.make_spec(folder)
    (folder / "train.safetensors").unlink()
    return spec


def test_killed_between_the_last_checkpoint_and_the_result(decoder: Decoder, tmp_path: Path) -> None:
    reference = undisturbed_job(decoder, tmp_path)
    expected = support.adapter_bytes(tmp_path)
    shutil.rmtree(tmp_path / "adapter")
    job = support.make_job(decoder, support.make_spec(tmp_path))
    assert job.upcoming() == ()
    assert not job.done
    assert [type(update) for update in support.run_to_end(job)] == [JobSucceeded]
    assert job.trained_tokens == reference.trained_tokens
    assert support.adapter_bytes(tmp_path) == expected
    job.close()


def test_a_checkpoint_of_other_settings_is_refused(decoder: Decoder, tmp_path: Path) -> None:
    job = support.make_job(decoder, support.make_spec(tmp_path))
    support.run_step(job)
    job.checkpoint()
    job.close()
    with pytest.raises(ConflictError, match="other settings"):
        support.make_job(decoder, support.make_spec(tmp_path, learning_rate=1.0))


@dataclass(frozen=True)
class _OneMoreSetting(Hyperparameters):
    added_later: float = 0.5


def test_a_job_goes_on_in_a_version_that_has_more_settings(decoder: Decoder, tmp_path: Path) -> None:
    spec = support.make_spec(tmp_path)
    job = support.make_job(decoder, spec)
    support.run_step(job)
    job.checkpoint()
    job.close()
    given = {field.name: getattr(spec.hyperparameters, field.name) for field in fields(spec.hyperparameters)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cotenant.finetune.state.Hyperparameters", _OneMoreSetting)
        later = support.make_job(decoder, replace(spec, hyperparameters=_OneMoreSetting(**given)))
        assert later.step == 1
        later.close()
        with pytest.raises(ConflictError, match="other settings"):
            support.make_job(decoder, replace(spec, hyperparameters=_OneMoreSetting(**given, added_later=0.6)))
