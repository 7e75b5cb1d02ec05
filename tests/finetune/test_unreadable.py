"""Files of a job that cannot be read when it is taken up: the job fails, and nothing that it has done is lost."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from cotenant.core.errors import CotenantError
from cotenant.core.job import JobSpec
from cotenant.core.job_layout import STATE_FILE, TENSOR_FILE
from cotenant.finetune.metrics import MetricsLog
from cotenant.models.decoder import Decoder
from finetune import support


def stopped_at_step_5(decoder: Decoder, folder: Path) -> JobSpec:
    """Of 10."""
    spec = support.make_spec(folder, save_steps=2)
    job = support.make_job(decoder, spec)
    for _ in range(5):
        support.run_step(job)
    job.checkpoint()
    job.close()
    return spec


def ends_as_undisturbed(decoder: Decoder, spec: JobSpec, folder: Path) -> None:
    job = support.make_job(decoder, spec)
    assert job.step == 5
    support.run_to_end(job)
    job.close()
    undisturbed = support.make_job(decoder, support.make_spec(folder, save_steps=2))
    support.run_to_end(undisturbed)
    undisturbed.close()
    assert support.adapter_bytes(Path(spec.folder)) == support.adapter_bytes(folder)
    assert (Path(spec.folder) / "metrics.jsonl").read_bytes() == (folder / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("name", [STATE_FILE, TENSOR_FILE, "adapter_model.safetensors"])
def test_a_checkpoint_that_cannot_be_read_now_is_not_passed_over(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """All reads fail, as where the disk is away for a moment, so that no earlier checkpoint can be read either."""
    spec = stopped_at_step_5(decoder, tmp_path / "job")
    really_open, really_read = Path.open, Path.read_bytes

    def is_away(path: Path) -> None:
        if path.name == name:
            raise OSError(errno.EIO, "Input/output error", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda path, *rest, **more: is_away(path) or really_open(path, *rest, **more))
        patched.setattr(Path, "read_bytes", lambda path: is_away(path) or really_read(path))
        with pytest.raises(CotenantError, match=name) as raised:
            support.make_job(decoder, spec)
    assert raised.value.code == "io_error"
    assert len(MetricsLog(tmp_path / "job" / "metrics.jsonl").read()) == 5
    ends_as_undisturbed(decoder, spec, tmp_path / "undisturbed")


def test_figures_with_a_hole_are_not_gone_on_with(decoder: Decoder, tmp_path: Path) -> None:
    spec = stopped_at_step_5(decoder, tmp_path / "job")
    path = tmp_path / "job" / "metrics.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"\0" * len(lines[2]), *lines[3:]]))
    with pytest.raises(CotenantError, match=r"metrics\.jsonl .* tells of 2 steps, .* of step 5") as raised:
        support.make_job(decoder, spec)
    assert raised.value.code == "io_error"
    path.write_bytes(whole)
    ends_as_undisturbed(decoder, spec, tmp_path / "undisturbed")
