"""How a job fails: disks, folders and losses; what it leaves behind is whole."""

from __future__ import annotations

import errno
import re
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

from cotenant import durable
from cotenant.core.errors import CotenantError
from cotenant.finetune import export
from cotenant.finetune.writer import as_write_error
from cotenant.models.decoder import Decoder
from cotenant.wire.messages import CheckpointSaved, JobFailed, JobMetrics, JobSucceeded
from finetune import support


def _snapshot_of_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", ["adapter", "fsync"])
def test_a_full_disk_fails_the_job_and_leaves_the_folder_intact(
    decoder: Decoder, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = support.make_spec(tmp_path, save_steps=2)
    job = support.make_job(decoder, spec)
    support.run_step(job)
    support.run_step(job)
    job.wait_for_writes()
    job.take_updates()
    before = _snapshot_of_files(tmp_path / "checkpoints")
    with monkeypatch.context() as patch:
        if where == "adapter":
            patch.setattr("cotenant.finetune.checkpoint.write_adapter_files", _full_disk)
        else:
            patch.setattr(durable, "fsync_path", _full_disk)
        updates = support.run_to_end(job)
    failed = updates[-1]
    assert isinstance(failed, JobFailed)
    assert failed.code == "disk_full"
    assert "No space left" in failed.message
    assert job.done
    assert job.upcoming() == ()
    assert job.checkpoint() == []
    job.close()
    assert _snapshot_of_files(tmp_path / "checkpoints") == before
    assert not (tmp_path / "adapter").exists()

    job = support.make_job(decoder, spec)  # there is room again
    assert job.step == 2
    assert isinstance(support.run_to_end(job)[-1], JobSucceeded)
    job.close()


def test_a_full_disk_at_a_pause_fails_the_job(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = support.make_job(decoder, support.make_spec(tmp_path))
    support.run_step(job)
    monkeypatch.setattr("cotenant.finetune.checkpoint.write_adapter_files", _full_disk)
    updates = job.checkpoint()
    assert [type(update) for update in updates] == [JobMetrics, JobFailed]
    assert job.done
    job.close()


def test_a_result_that_cannot_be_written_fails_the_job(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(export, "write_adapter_files", denied)
    job = support.make_job(decoder, support.make_spec(tmp_path, max_steps=1))
    updates = support.run_to_end(job)
    assert [type(update) for update in updates] == [JobMetrics, CheckpointSaved, JobFailed]
    assert updates[-1].code == "io_error"  # type: ignore[union-attr]
    assert job.finished_path is None
    job.close()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk_full"),
        (OSError(errno.EIO, "Input/output error"), "io_error"),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), "disk_full"),
        (SafetensorError("Error while serializing: I/O error: File too large (os error 27)"), "io_error"),
    ],
)
def test_codes_of_write_errors(error: OSError | SafetensorError, code: str) -> None:
    failure = as_write_error(error)
    assert failure.code == code
    assert str(error) in failure.message


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(decoder: Decoder, tmp_path: Path) -> None:
    spec = support.make_spec(tmp_path / "job")
    (tmp_path / "job" / "metrics.jsonl").mkdir()
    with pytest.raises(CotenantError) as error:
        support.make_job(decoder, spec)
    assert error.value.code == "io_error"


def test_a_loss_that_is_not_finite_fails_the_job(decoder: Decoder, tmp_path: Path) -> None:
    job = support.make_job(decoder, support.make_spec(tmp_path, save_steps=1))
    support.run_step(job)
    for parameter in job.adapter.parameters():
        parameter.data.mul_(float("inf"))
    updates = support.run_to_end(job)
    failed = updates[-1]
    assert isinstance(failed, JobFailed)
    assert failed.step == 1
    assert "loss is not finite at step 2" in failed.message
    assert "nan" in failed.message
    assert [update.step for update in updates if isinstance(update, CheckpointSaved)] == [1]
    job.close()
    job = support.make_job(decoder, support.make_spec(tmp_path, save_steps=1))
    assert job.step == 1  # the last good checkpoint is still there
    job.close()


@pytest.mark.parametrize("method", ["supervised", "dpo"])
def test_a_learning_rate_of_a_million_fails_the_job(decoder: Decoder, tmp_path: Path, method: str) -> None:
    changes = {"learning_rate": 1e6, "warmup_steps": 2, "save_steps": 1, "method": method, "n_epochs": 20}
    job = support.make_job(decoder, support.make_spec(tmp_path, **changes))
    updates = support.run_to_end(job)
    job.close()
    failed = updates[-1]
    assert isinstance(failed, JobFailed)
    assert failed.code == "training_diverged"
    assert failed.bad_step == failed.step  # those weights gave the loss that is not finite
    assert f"The loss is not finite at step {failed.step + 1}" in failed.message
    assert "learning_rate" in failed.message
    steps = [update.step for update in updates if isinstance(update, CheckpointSaved)]
    assert steps == list(range(1, failed.step + 1))
    for path in (tmp_path / "checkpoints").iterdir():
        tensors = safetensors.torch.load_file(path / "adapter_model.safetensors")
        assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())


def test_a_gradient_alone_that_is_not_finite_says_nothing_against_the_last_checkpoint(
    decoder: Decoder, tmp_path: Path
) -> None:
    job = support.make_job(decoder, support.make_spec(tmp_path, save_steps=1))
    support.run_step(job)
    support.run(job, sum(cycle.num_tasklets for cycle in job.upcoming()) - 1)
    gradient = job.adapter.parameters()[0].grad
    assert gradient is not None
    gradient.fill_(float("inf"))
    failed = support.run_to_end(job)[-1]
    job.close()
    assert isinstance(failed, JobFailed)
    assert (failed.code, failed.step, failed.bad_step) == ("training_diverged", 1, None)
    assert "at step 2, judged by its gradient: the norm of that is " in failed.message
    assert "The checkpoint of step 1 is kept" in failed.message


@pytest.mark.parametrize("method", ["supervised", "dpo"])
@pytest.mark.parametrize("validated", [True, False])
def test_a_last_step_that_diverges_is_not_exported(
    decoder: Decoder, tmp_path: Path, method: str, validated: bool
) -> None:
    changes = {"learning_rate": 1e6, "lr_scheduler_type": "constant", "warmup_steps": 0, "method": method}
    validation = support.random_examples(10, seed=5) if validated else None
    job = support.make_job(decoder, support.make_spec(tmp_path, validation=validation, max_steps=1, **changes))
    updates = support.run_to_end(job)
    job.close()
    failed = updates[-1]
    assert isinstance(failed, JobFailed)
    assert failed.code == "training_diverged"
    where = "on the validation file" if validated else "with the last step's weights"
    assert f"The loss is not finite at step 1: {where} it is " in failed.message
    assert failed.bad_step == 1
    assert not [update for update in updates if isinstance(update, CheckpointSaved | JobSucceeded)]
    assert not (tmp_path / "adapter").exists()


def test_leftovers_of_a_crash_are_removed(decoder: Decoder, tmp_path: Path) -> None:
    spec = support.make_spec(tmp_path)
    leftover = tmp_path / "checkpoints" / ".tmp-abc_efg1"
    leftover.mkdir(parents=True)
    (leftover / "file").write_text("half")
    support.make_job(decoder, spec).close()
    assert not leftover.exists()
    shutil.rmtree(tmp_path)


def test_a_job_that_cannot_fit_says_how_much_it_lacks(decoder: Decoder, tmp_path: Path) -> None:
    """Before it has taken any step, and what would make it fit."""
    spec = support.make_spec(tmp_path, examples=[*support.random_examples(9), ([5] * 37, [1.0] * 37)])
    with pytest.raises(CotenantError) as refused:
        support.make_job(decoder, spec, free_bytes=1000)
    assert refused.value.code == "insufficient_memory"
    needed = int(re.findall(r"needs (\d+) bytes", refused.value.message)[0])
    assert f"{needed - 1000} (" in refused.value.message
    assert "longest example, 37 tokens" in refused.value.message
    with pytest.raises(CotenantError, match=r"so 1 .* lacking"):
        support.make_job(decoder, spec, free_bytes=needed - 1)
    support.make_job(decoder, spec, free_bytes=needed).close()
