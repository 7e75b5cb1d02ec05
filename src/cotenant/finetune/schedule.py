"""Learning-rate schedules with the names and the values of ``transformers.get_scheduler``."""

from __future__ import annotations

import math
from collections.abc import Mapping

from cotenant.core.errors import InvalidInputError
from cotenant.core.job import DEFAULT_LR_END, SCHEDULES, Hyperparameters

_DEFAULT_TIMESCALE = 10_000  # of inverse_sqrt without a warm-up


def num_warmup_steps(hyper: Hyperparameters, total_steps: int) -> int:
    """Steps of the linear warm-up: ``warmup_steps``, or ``warmup_ratio`` of all steps rounded up."""
    return hyper.warmup_steps if hyper.warmup_steps > 0 else math.ceil(total_steps * hyper.warmup_ratio)


def schedule_warnings(hyper: Hyperparameters, total_steps: int) -> list[str]:
    """What a job's owner should know of its schedule: transformers does the same, and says nothing."""
    num_warmup = num_warmup_steps(hyper, total_steps)
    if num_warmup and hyper.lr_scheduler_type == "constant":
        return [
            f"The schedule 'constant' has no warm-up: the {num_warmup} steps of warmup_steps or warmup_ratio count for "
            "nothing. 'constant_with_warmup' has one"
        ]
    if num_warmup < total_steps:
        return _decay_warnings(hyper, num_warmup, total_steps)
    return [
        f"The warm-up takes {num_warmup} step(s), and the job has {total_steps}: the learning rate begins at 0 and "
        f"never comes to learning_rate={hyper.learning_rate:g}. Lower warmup_steps or warmup_ratio, or train for longer"
    ]


def _decay_warnings(hyper: Hyperparameters, num_warmup: int, total_steps: int) -> list[str]:
    """Of one that has begun before the warm-up ends, or the job."""
    if hyper.lr_scheduler_type != "warmup_stable_decay":
        return []
    num_decay = int(hyper.lr_scheduler_kwargs["num_decay_steps"])
    if num_warmup + num_decay <= total_steps:
        return []
    return [
        f"The decay takes {num_decay} step(s) and the warm-up {num_warmup}, and the job has {total_steps}: no step is "
        f"between the two, and the decay begins in its midst, at {learning_rate(hyper, num_warmup, total_steps):.3g} "
        f"instead of learning_rate={hyper.learning_rate:g}. Lower num_decay_steps, or train for longer"
    ]


def learning_rate(hyper: Hyperparameters, step_index: int, total_steps: int) -> float:
    """The learning rate of optimizer step ``step_index``, counted from 0 (so a warm-up's first step has rate 0)."""
    return hyper.learning_rate * _factor(hyper, step_index, total_steps)


def _factor(hyper: Hyperparameters, step_index: int, total_steps: int) -> float:
    """What the schedule makes of a learning rate of 1."""
    name, settings = hyper.lr_scheduler_type, hyper.lr_scheduler_kwargs
    if name not in SCHEDULES:
        raise InvalidInputError(f"lr_scheduler_type '{name}' is not one of {', '.join(SCHEDULES)}")
    if name == "constant":
        return 1.0
    num_warmup = num_warmup_steps(hyper, total_steps)
    if name == "warmup_stable_decay":
        return _warmup_stable_decay(settings, step_index, num_warmup, total_steps)
    if step_index < num_warmup:
        return step_index / max(1, num_warmup)
    num_decay = max(1, total_steps - num_warmup)
    progress = (step_index - num_warmup) / num_decay
    if name == "linear":
        return max(0.0, (total_steps - step_index) / num_decay)
    if name == "cosine":
        return _cosine(settings, progress)
    if name == "cosine_with_min_lr":
        least = settings["min_lr"] / hyper.learning_rate if "min_lr" in settings else settings["min_lr_rate"]
        return max(0.0, _cosine(settings, progress) * (1.0 - least) + least)
    if name == "cosine_with_restarts":
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * (settings.get("num_cycles", 1.0) * progress % 1.0))))
    if name == "polynomial":
        end = settings.get("lr_end", DEFAULT_LR_END) / hyper.learning_rate
        return (1.0 - end) * math.pow(1.0 - progress, settings.get("power", 1.0)) + end
    if name == "inverse_sqrt":
        timescale = settings.get("timescale") or num_warmup or _DEFAULT_TIMESCALE
        return math.sqrt(timescale / (step_index + timescale - num_warmup))
    return 1.0


def _cosine(settings: Mapping[str, float], progress: float) -> float:
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * settings.get("num_cycles", 0.5) * 2.0 * progress)))


def _warmup_stable_decay(settings: Mapping[str, float], step_index: int, num_warmup: int, total_steps: int) -> float:
    """Linear up from ``min_lr_ratio``, constant, and along a cosine down to it in the last ``num_decay_steps``."""
    least = settings.get("min_lr_ratio", 0.0)
    num_decay = settings["num_decay_steps"]
    decay_start = total_steps - num_decay
    if step_index < num_warmup:
        factor = step_index / max(1, num_warmup)
    elif step_index < decay_start:
        return 1.0
    else:
        factor = _cosine(settings, (step_index - decay_start) / max(1.0, num_decay))
    return factor * (1.0 - least) + least
