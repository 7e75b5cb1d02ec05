"""Learning-rate schedules with the names and the values of ``transformers.get_scheduler``."""

from __future__ import annotations

import math

from cotenant.core.errors import InvalidInputError
from cotenant.core.job import SCHEDULES, Hyperparameters


def num_warmup_steps(hyper: Hyperparameters, total_steps: int) -> int:
    """Steps of the linear warm-up: ``warmup_steps``, or ``warmup_ratio`` of all steps rounded up."""
    return hyper.warmup_steps if hyper.warmup_steps > 0 else math.ceil(total_steps * hyper.warmup_ratio)


def learning_rate(hyper: Hyperparameters, step_index: int, total_steps: int) -> float:
    """The learning rate of optimizer step ``step_index``, counted from 0 (so a warm-up's first step has rate 0)."""
    return hyper.learning_rate * _factor(hyper.lr_scheduler_type, step_index, _warmup(hyper, total_steps), total_steps)


def _warmup(hyper: Hyperparameters, total_steps: int) -> int:
    return 0 if hyper.lr_scheduler_type == "constant" else num_warmup_steps(hyper, total_steps)


def _factor(name: str, step_index: int, num_warmup: int, total_steps: int) -> float:
    if name not in SCHEDULES:
        raise InvalidInputError(f"lr_scheduler_type '{name}' is not one of {', '.join(SCHEDULES)}")
    if step_index < num_warmup:
        return step_index / max(1, num_warmup)
    num_decay = max(1, total_steps - num_warmup)
    if name == "linear":
        return max(0.0, (total_steps - step_index) / num_decay)
    if name == "cosine":
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * (step_index - num_warmup) / num_decay)))
    return 1.0
