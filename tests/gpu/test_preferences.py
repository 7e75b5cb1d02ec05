"""A DPO job on the GPU gives the CPU's losses and rewards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cotenant.config import ModelConfig
from cotenant.core.job import StepMetrics
from cotenant.models.loading import load_decoder
from cotenant.models.registry import resolve_model
from cotenant.wire.messages import JobMetrics
from finetune import support
from finetune.conftest import save_llama


def steps_on(device: str, model: Path, folder: Path) -> list[StepMetrics]:
    resolved = resolve_model(ModelConfig(model=str(model), device=device))
    decoder = load_decoder(resolved, torch.device(device), torch.float32, seed=0)
    validation = support.random_examples(10, seed=5)
    job = support.make_job(decoder, support.make_spec(folder, None, validation, method="dpo", batch_size=3, n_epochs=3))
    updates = support.run_to_end(job)
    job.close()
    return [step for update in updates if isinstance(update, JobMetrics) for step in update.steps]


def test_losses_and_rewards_equal_the_cpus(tmp_path: Path) -> None:
    save_llama(tmp_path / "model")
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        ours, expected = (steps_on(device, tmp_path / "model", tmp_path / device) for device in ("cuda", "cpu"))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert len(ours) == len(expected) == 9
    for step, other in zip(ours, expected, strict=True):
        assert step.train_loss == pytest.approx(other.train_loss, rel=1e-3)
        assert step.preference is not None
        assert other.preference is not None
        assert step.preference.margins == pytest.approx(other.preference.margins, rel=1e-2, abs=1e-3)
        assert (step.full_valid_loss or 0.0) == pytest.approx(other.full_valid_loss or 0.0, rel=1e-3)
    assert expected[-1].preference is not None
    assert expected[-1].preference.margins > 0.1
