"""A job that is killed, or stopped and taken up again, ends with the same bytes as one that was left alone."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

import forked
from cotenant.core.errors import ConflictError
from cotenant.core.job import Hyperparameters, JobSpec
from cotenant.core.job_layout import STATE_FILE, TENSOR_FILE
from cotenant.core.tasklet import TaskletKind
from cotenant.finetune.captured import BACKWARD_PARTS, FORWARD_PARTS, RECOMPUTE_PARTS
from cotenant.finetune.checkpoint import CheckpointStore
from cotenant.finetune.job import TrainingJob
from cotenant.finetune.metrics import MetricsLog
from cotenant.models.decoder import Decoder
from cotenant.wire.messages import CheckpointSaved, JobMetrics, JobStarted, JobSucceeded
from finetune import run_job, support

VALIDATION = support.random_examples(10, seed=5)
PATTERNS = {"rank_pattern": {"q_proj": 3, "down_proj": 7}, "alpha_pattern": {"up_proj": 3.0}, "use_rslora": True}
DPO = {"method": "dpo", "batch_size": 3, "lora_dropout": 0.1}
# Of captured layers, which a CPU does not have, and of those that are recomputed, which few jobs have.
PARTS = {*FORWARD_PARTS, *RECOMPUTE_PARTS, *BACKWARD_PARTS, TaskletKind.RECOMPUTE}


def _reference(decoder: Decoder, folder: Path, **changes: object) -> TrainingJob:
    job = support.make_job(decoder, support.make_spec(folder, validation=VALIDATION, **changes))
    support.run_to_end(job)
    job.close()
    return job


def _assert_same_result(folder: Path, reference: Path, num_steps: int) -> None:
    assert support.adapter_bytes(folder) == support.adapter_bytes(reference)
    assert (folder / "metrics.jsonl").read_bytes() == (reference / "metrics.jsonl").read_bytes()
    steps = MetricsLog(folder / "metrics.jsonl").read()
    assert [step.step for step in steps] == list(range(1, num_steps + 1))
    assert not list(folder.rglob(".tmp-*"))


@pytest.mark.parametrize("method", run_job.CHANGES)
def test_killed_at_random_moments(decoder: Decoder, model_folder: Path, tmp_path: Path, method: str) -> None:
    reference = _reference(decoder, tmp_path / "reference", **run_job.CHANGES[method])
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
    return _Undisturbed(changes, folder, _reference(decoder, folder, **changes).total_steps)


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


def test_only_announced_checkpoints_and_the_newest_pause_are_kept(decoder: Decoder, tmp_path: Path) -> None:
    spec = support.make_spec(tmp_path, save_steps=4)
    job = support.make_job(decoder, spec)
    saved = []
    for _ in range(7):
        support.run_step(job)
        saved += [update.step for update in job.checkpoint() if isinstance(update, CheckpointSaved)]
    job.close()
    assert saved == [4, 5]  # save_steps and the end of the first epoch of 5 steps
    assert _checkpoints(tmp_path) == [4, 5, 7]
    job = support.make_job(decoder, spec)
    assert job.step == 7
    announced = [update.step for update in job.start_updates() if isinstance(update, CheckpointSaved)]
    assert announced == [4, 5]
    support.run_to_end(job)
    job.close()
    assert _checkpoints(tmp_path) == [4, 5, 8, 10]


def test_a_kill_while_a_checkpoint_is_deleted_leaves_nothing_of_its_name(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of one would be listed, and answer no request, when the job ends."""
    job = support.make_job(decoder, support.make_spec(tmp_path, save_steps=4))
    monkeypatch.setattr(shutil, "rmtree", lambda *arguments, **named: None)  # as far as a kill lets it come
    for _ in range(7):
        support.run_step(job)
        list(job.checkpoint())
    job.close()
    kept = [path.name for path in (tmp_path / "checkpoints").iterdir() if not path.name.startswith(".tmp-")]
    assert sorted(kept) == ["step-00000004", "step-00000005", "step-00000007"]


@pytest.mark.parametrize(("limit", "kept"), [(None, [2, 4, 5, 6, 8, 10]), (2, [8, 10]), (1, [10])])
@pytest.mark.parametrize("stops", [False, True])
def test_older_checkpoints_go_beyond_the_limit(
    decoder: Decoder, tmp_path: Path, limit: int | None, kept: list[int], stops: bool
) -> None:
    spec = support.make_spec(tmp_path, save_steps=2, save_total_limit=limit)
    job = support.make_job(decoder, spec)
    for _ in range(9):
        support.run_step(job)
        job.wait_for_writes()
        assert limit is None or len(_checkpoints(tmp_path)) <= limit
        if stops:
            job.checkpoint()
            assert limit is None or len(_checkpoints(tmp_path)) <= limit + 1
            job.close()
            job = support.make_job(decoder, spec)
    support.run_to_end(job)
    job.close()
    assert _checkpoints(tmp_path) == kept


def test_what_a_kill_left_over_the_limit_goes_at_the_next_start(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = support.make_spec(tmp_path, save_steps=2, save_total_limit=2)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "keep_newest", lambda *_: None)
        job = support.make_job(decoder, spec)
        for _ in range(6):
            support.run_step(job)
        job.wait_for_writes()
        job.close()
    assert _checkpoints(tmp_path) == [2, 4, 5, 6]
    job = support.make_job(decoder, spec)
    assert job.step == 6
    announced = [update.step for update in job.start_updates() if isinstance(update, CheckpointSaved)]
    assert announced == _checkpoints(tmp_path) == [5, 6]
    job.close()


def test_what_a_kill_left_behind_the_last_checkpoint_goes_at_the_next_start(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is none to come that would take it away: only the result is to be written."""
    spec = support.make_spec(tmp_path, save_steps=3)
    job = support.make_job(decoder, spec)
    for _ in range(7):
        support.run_step(job)
    job.checkpoint()
    assert _checkpoints(tmp_path) == [3, 5, 6, 7]
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "_remove_superfluous", lambda *_: None)
        while job.step < 10:
            support.run_step(job)
        job.wait_for_writes()
        job.close()
    shutil.rmtree(tmp_path / "adapter", ignore_errors=True)
    assert _checkpoints(tmp_path) == [3, 5, 6, 7, 9, 10]
    job = support.make_job(decoder, spec)
    assert job.upcoming() == ()
    announced = [update.step for update in job.start_updates() if isinstance(update, CheckpointSaved)]
    assert announced == _checkpoints(tmp_path) == [3, 5, 6, 9, 10]
    resumable = [path.parent.name for path in sorted(tmp_path.glob(f"checkpoints/*/{TENSOR_FILE}"))]
    assert resumable == ["step-00000009", "step-00000010"]
    support.run_to_end(job)
    job.close()


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_the_best_checkpoint_is_kept_within_the_limit(decoder: Decoder, tmp_path: Path, limit: int) -> None:
    settings = {"learning_rate": 0.05, "n_epochs": 4, "load_best_model_at_end": True, "save_total_limit": limit}
    job = _reference(decoder, tmp_path, **settings)
    best = job.start_updates()[-1]
    assert isinstance(best, JobSucceeded)
    kept = _checkpoints(tmp_path)
    assert {best.best_step, 20} <= set(kept)
    assert len(kept) == max(limit, len({best.best_step, 20}))


def _train(decoder: Decoder, spec: JobSpec, num_steps: int) -> None:
    """So far; what it has written is on disk."""
    job = support.make_job(decoder, spec)
    for _ in range(num_steps):
        support.run_step(job)
    job.wait_for_writes()
    job.close()


def _checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("*"))


def _tear(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (STATE_FILE, _tear),
        (STATE_FILE, Path.unlink),
        (TENSOR_FILE, _tear),
        (TENSOR_FILE, _flip),
        (TENSOR_FILE, Path.unlink),
        ("adapter_model.safetensors", _flip),
        ("adapter_model.safetensors", Path.unlink),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(
    decoder: Decoder, tmp_path: Path, name: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    spec = support.make_spec(tmp_path, save_steps=2)
    _train(decoder, spec, 4)
    damage(tmp_path / "checkpoints" / "step-00000004" / name)
    job = support.make_job(decoder, spec)
    assert job.step == 2
    assert [step.step for step in MetricsLog(tmp_path / "metrics.jsonl").read()] == [1, 2]
    assert [update.step for update in job.start_updates() if isinstance(update, CheckpointSaved)] == [2]
    assert "step-00000004" in caplog.text
    support.run_to_end(job)
    job.close()
    assert _checkpoints(tmp_path) == [2, 4, 5, 6, 8, 10]


def test_what_was_read_of_a_checkpoint_outlives_its_file(decoder: Decoder, tmp_path: Path) -> None:
    _train(decoder, support.make_spec(tmp_path, save_steps=2), 2)
    store = CheckpointStore(tmp_path / "checkpoints", "base", None)
    path = store.path(2) / TENSOR_FILE
    expected = safetensors.torch.load(path.read_bytes())
    newest = store.newest()
    assert newest is not None
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    _, tensors = newest
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_damaged_checkpoints_of_later_steps_cost_none_that_is_written_after_them(
    decoder: Decoder, tmp_path: Path
) -> None:
    spec = support.make_spec(tmp_path, save_steps=2)
    _train(decoder, spec, 6)
    for path in (tmp_path / "checkpoints").iterdir():
        (path / "trainer_state.safetensors").unlink(missing_ok=True)
    job = support.make_job(decoder, spec)
    assert job.step == 0
    support.run_step(job)
    job.checkpoint()
    job.close()
    job = support.make_job(decoder, spec)
    assert job.step == 1
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
    reference = _reference(decoder, tmp_path)
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
    reference = _reference(decoder, tmp_path)
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


def test_old_checkpoints_are_served_but_keep_no_training_state(decoder: Decoder, tmp_path: Path) -> None:
    spec = support.make_spec(tmp_path, save_steps=1, max_steps=6)
    job = support.make_job(decoder, spec)
    support.run_to_end(job)
    job.close()
    folders = sorted((tmp_path / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == [f"step-{step:08d}" for step in range(1, 7)]
    assert all((folder / "adapter_model.safetensors").is_file() for folder in folders)
    assert [(folder / "trainer_state.safetensors").is_file() for folder in folders] == [False] * 4 + [True] * 2
    again = support.make_job(decoder, spec)
    announced = [update.step for update in again.start_updates() if isinstance(update, CheckpointSaved)]
    again.close()
    assert announced == list(range(1, 7))


def test_a_checkpoint_that_finds_no_memory_is_not_passed_over(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = support.make_spec(tmp_path, save_steps=1, max_steps=4)
    job = support.make_job(decoder, spec)
    support.run_step(job)
    job.checkpoint()
    job.close()

    def find_no_memory(*_: object) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("cotenant.finetune.checkpoint.read_whole", find_no_memory)
        with pytest.raises(MemoryError):
            support.make_job(decoder, spec)
    again = support.make_job(decoder, spec)
    assert again.step == 1
    again.close()
