"""On conversations in English and a small trained model, losses and adapters equal PEFT's with TRL's losses.

``COTENANT_TEST_CHAT_DATA`` names another JSONL file in OpenAI's chat format to take the conversations from.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import peft
import pytest
import safetensors.torch
import torch

from cotenant.core.job import Hyperparameters, JobSpec, StepMetrics
from cotenant.finetune.dataset import load_dataset
from cotenant.finetune.job import TrainingJob
from cotenant.models.decoder import Decoder
from cotenant.models.lora import save_adapter
from cotenant.wire.messages import JobMetrics
from finetune import reference, support
from finetune.conversations import TINY, VOCAB_SIZE, make_spec

# Adam turns a gradient that is all rounding error into a whole step; this epsilon keeps such elements still.
COMMON = Hyperparameters(learning_rate=2e-3, adam_epsilon=1e-5, max_length=512, seed=3, n_epochs=2, batch_size=4)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return support.load(TINY)


def _train(decoder: Decoder, spec: JobSpec, initial: Path) -> list[StepMetrics]:
    job = TrainingJob(decoder, spec, 300, None)
    save_adapter(job.adapter, initial, str(TINY))
    updates = support.run_to_end(job)
    job.close()
    return [step for update in updates if isinstance(update, JobMetrics) for step in update.steps]


CASES: dict[str, tuple[Hyperparameters, reference.Loss]] = {
    "sft": (replace(COMMON, r=8, warmup_steps=2), reference.sft_loss),
    "sft-packed": (replace(COMMON, packing=True, batch_size=1, n_epochs=3, use_rslora=True, r=4), reference.sft_loss),
    "dpo": (replace(COMMON, method="dpo", r=8, warmup_steps=2), reference.dpo_loss(0.1, 0.0)),
    "dpo-smoothed": (
        replace(COMMON, method="dpo", beta=0.5, label_smoothing=0.2, batch_size=7, r=4),
        reference.dpo_loss(0.5, 0.2),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_trajectory_and_adapter_equal_peft(decoder: Decoder, tmp_path: Path, name: str) -> None:
    hyper, loss = CASES[name]
    spec = make_spec(tmp_path / "job", hyper)
    steps = _train(decoder, spec, tmp_path / "initial")
    model = reference.load(TINY, tmp_path / "initial")
    expected = reference.train(model, load_dataset(Path(spec.dataset_path), 512, VOCAB_SIZE), hyper, loss)

    losses = [loss for loss, *_ in expected]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])  # it does learn
    assert len(steps) == len(expected)
    for step, (loss_value, norm, rate, others) in zip(steps, expected, strict=True):
        assert (step.train_loss, step.grad_norm, step.learning_rate) == pytest.approx(
            (loss_value, norm, rate), rel=1e-4
        )
        for figure, value in others.items():
            assert getattr(step.preference, figure) == pytest.approx(value, rel=1e-4, abs=1e-4), figure
    trained = safetensors.torch.load_file(tmp_path / "job" / "adapter" / "adapter_model.safetensors")
    wanted = peft.get_peft_model_state_dict(model)
    assert trained.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert float((trained[key] - tensor).norm() / tensor.norm()) < 1e-4, key


def test_the_first_dpo_step_is_at_the_reference(decoder: Decoder, tmp_path: Path) -> None:
    """A fresh adapter is the base, so every reward is 0 and the loss log 2."""
    spec = make_spec(tmp_path / "job", Hyperparameters(method="dpo", batch_size=24, max_steps=1, max_length=512))
    (step,) = _train(decoder, spec, tmp_path / "initial")
    assert step.train_loss == pytest.approx(float(torch.log(torch.tensor(2.0))), abs=1e-6)
    assert step.preference is not None
    assert (step.preference.chosen, step.preference.rejected) == pytest.approx((0.0, 0.0), abs=1e-5)
    assert step.preference.logps_chosen > step.preference.logps_rejected
    assert step.grad_norm > 0
