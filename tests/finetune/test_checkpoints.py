"""Which checkpoints a job keeps, and which it passes over when it is taken up again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from cotenant.core.job import JobSpec
from cotenant.core.job_layout import STATE_FILE, TENSOR_FILE
from cotenant.finetune.checkpoint import CheckpointStore
from cotenant.finetune.metrics import MetricsLog
from cotenant.models.decoder import Decoder
from cotenant.wire.messages import CheckpointSaved, JobSucceeded
from finetune import support
from finetune.undisturbed_jobs import undisturbed_job


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
    job = undisturbed_job(decoder, tmp_path, **settings)
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


def _replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (STATE_FILE, _tear),
        (STATE_FILE, Path.unlink),
        (STATE_FILE, _replace_by_a_folder),
        (TENSOR_FILE, _tear),
        (TENSOR_FILE, _replace_by_a_folder),
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
