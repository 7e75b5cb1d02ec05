from __future__ import annotations

import pytest
import torch
import transformers

from cotenant.core.errors import InvalidInputError
from cotenant.core.job import SCHEDULES, Hyperparameters
from cotenant.finetune.schedule import learning_rate, num_warmup_steps


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("warmup_steps", "warmup_ratio"), [(0, 0.0), (7, 0.0), (0, 0.13), (60, 0.0)])
def test_equals_transformers(name: str, warmup_steps: int, warmup_ratio: float) -> None:
    total_steps = 50
    hyper = Hyperparameters(
        learning_rate=3e-4, lr_scheduler_type=name, warmup_steps=warmup_steps, warmup_ratio=warmup_ratio
    )
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=hyper.learning_rate)
    warmup = transformers.TrainingArguments(
        output_dir="unused", warmup_steps=warmup_steps or warmup_ratio
    ).get_warmup_steps(total_steps)
    reference = transformers.get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total_steps)
    for step_index in range(total_steps):
        assert learning_rate(hyper, step_index, total_steps) == pytest.approx(reference.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        reference.step()


def test_warmup_ratio_rounds_up() -> None:
    assert num_warmup_steps(Hyperparameters(warmup_ratio=0.1), 11) == 2


def test_unknown_schedule_is_named() -> None:
    with pytest.raises(InvalidInputError, match="polynomial"):
        learning_rate(Hyperparameters(lr_scheduler_type="polynomial"), 0, 10)
