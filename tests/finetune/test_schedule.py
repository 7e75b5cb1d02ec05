from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from cotenant.core.errors import InvalidInputError
from cotenant.core.job import SCHEDULES, Hyperparameters
from cotenant.finetune.schedule import learning_rate, num_warmup_steps, schedule_warnings

_DECAYING = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 4}}

CASES = [
    *((name, {}) for name in SCHEDULES if name not in ("cosine_with_min_lr", "warmup_stable_decay")),
    ("cosine", {"num_cycles": 1.5}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("cosine_with_min_lr", {"min_lr": 3e-5}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.2, "num_cycles": 0.7}),
    ("polynomial", {"lr_end": 1e-5, "power": 2.0}),
    ("inverse_sqrt", {"timescale": 20}),
    ("warmup_stable_decay", {"num_decay_steps": 12}),
    ("warmup_stable_decay", {"num_decay_steps": 30, "min_lr_ratio": 0.1, "num_cycles": 1.0}),
]


@pytest.mark.parametrize(("name", "settings"), CASES)
@pytest.mark.parametrize(("warmup_steps", "warmup_ratio"), [(0, 0.0), (7, 0.0), (0, 0.13), (60, 0.0)])
def test_equals_transformers(name: str, settings: dict[str, float], warmup_steps: int, warmup_ratio: float) -> None:
    total_steps = 50
    hyper = Hyperparameters(
        learning_rate=3e-4,
        lr_scheduler_type=name,
        lr_scheduler_kwargs=settings,
        warmup_steps=warmup_steps,
        warmup_ratio=warmup_ratio,
    )
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=hyper.learning_rate)
    warmup = transformers.TrainingArguments(
        output_dir="unused", warmup_steps=warmup_steps or warmup_ratio
    ).get_warmup_steps(total_steps)
    reference = transformers.get_scheduler(
        name,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=total_steps,
        scheduler_specific_kwargs=settings,
    )
    for step_index in range(total_steps):
        assert learning_rate(hyper, step_index, total_steps) == pytest.approx(reference.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        reference.step()


def test_warmup_ratio_rounds_up() -> None:
    assert num_warmup_steps(Hyperparameters(warmup_ratio=0.1), 11) == 2


@pytest.mark.parametrize(
    ("settings", "total_steps", "expected"),
    [
        ({"warmup_steps": 3}, 4, None),
        ({"warmup_steps": 4}, 4, "takes 4 step(s), and the job has 4"),
        ({"warmup_ratio": 0.1}, 1, "takes 1 step(s), and the job has 1"),
        ({"lr_scheduler_type": "warmup_stable_decay", "warmup_steps": 9}, 4, "takes 9 step(s)"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 2}, 8, "'constant' has no warm-up"),
        ({"lr_scheduler_type": "constant"}, 8, None),
        ({**_DECAYING, "warmup_steps": 2}, 6, None),
        ({**_DECAYING, "warmup_steps": 2}, 5, "4 step(s) and the warm-up 2, and the job has 5: no step is between"),
        ({**_DECAYING, "learning_rate": 1e-3}, 2, "begins in its midst, at 0.0005 instead of learning_rate=0.001."),
    ],
)
def test_a_schedule_that_does_not_fit_the_job_is_told(
    settings: dict[str, Any], total_steps: int, expected: str | None
) -> None:
    warnings = schedule_warnings(Hyperparameters(**settings), total_steps)
    assert len(warnings) == (expected is not None)
    assert expected is None or expected in warnings[0]


def test_unknown_schedule_is_named() -> None:
    with pytest.raises(InvalidInputError, match="magic"):
        learning_rate(Hyperparameters(lr_scheduler_type="magic"), 0, 10)
