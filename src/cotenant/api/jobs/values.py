"""What a hyperparameter's value must be, by its name: types and ranges, with errors that say what was expected."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from cotenant.core.errors import InvalidInputError
from cotenant.core.job import BEST_METRICS, DPO, LINEAR_MODULES, SCHEDULES
from cotenant.core.module_pattern import end_pattern

MAX_SEED = 2**31 - 1
MAX_BATCH_SIZE = 4096
DPO_ONLY = ("beta", "label_smoothing")
_MAX_EPOCHS = 1000
_MAX_STEPS = 10_000_000
# Far beyond sense: such a job starts, and fails when its loss is not finite.
_MAX_LEARNING_RATE = 1e6
_MAX_MULTIPLIER = 1e12
_MIN_EPSILON = 1e-30  # one that float32 rounds to 0 would leave a division of 0 by 0
_MAX_PATTERN = 200  # characters
_MAX_PATTERNS = 64
_MAX_REPEATS = 3
_REPEAT = re.compile(r"[*+?{]")

Check = Callable[[str, Any], Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server allows. ``max_model_len``: tokens; ``max_lora_rank``: of the adapters that it serves.
    ``num_layers``: the model's."""

    max_model_len: int
    max_lora_rank: int
    num_layers: int


def checks_of(limits: Limits, method: str) -> dict[str, Check]:
    """Every name that a method knows, and what its value must be."""
    checks = _common_checks(limits)
    if method == DPO:
        checks |= {
            "beta": number(0, 100, above=True),
            "label_smoothing": number(0, 0.5, below=True),
            "loss_type": _sigmoid,
            "packing": _never_packed,
            "metric_for_best_model": _best_metric(BEST_METRICS),
        }
    return checks


def _common_checks(limits: Limits) -> dict[str, Check]:
    return {
        "n_epochs": between(1, _MAX_EPOCHS),
        "num_train_epochs": between(1, _MAX_EPOCHS),
        "batch_size": between(1, MAX_BATCH_SIZE),
        "per_device_train_batch_size": between(1, MAX_BATCH_SIZE),
        "gradient_accumulation_steps": between(1, MAX_BATCH_SIZE),
        "learning_rate_multiplier": number(0, _MAX_MULTIPLIER, above=True),
        "learning_rate": number(0, _MAX_LEARNING_RATE, above=True),
        "lr_scheduler_type": _schedule,
        "lr_scheduler_kwargs": _schedule_settings,
        "warmup_ratio": number(0, 1),
        "warmup_steps": between(0, _MAX_STEPS, " (a share of all steps is warmup_ratio)"),
        "weight_decay": number(0, 1),
        "adam_beta1": number(0, 1, below=True),
        "adam_beta2": number(0, 1, below=True),
        "adam_epsilon": number(_MIN_EPSILON, 1),
        "max_grad_norm": number(0, 1e6),
        "max_steps": _max_steps,
        "max_length": between(2, limits.max_model_len),
        "packing": boolean,
        "gradient_checkpointing": boolean,
        "assistant_only_loss": _only_true,
        "eval_steps": between(0, _MAX_STEPS),
        "save_steps": between(0, _MAX_STEPS),
        "save_total_limit": between(0, _MAX_STEPS),
        "load_best_model_at_end": boolean,
        "metric_for_best_model": _best_metric([name for name in BEST_METRICS if not name.startswith("rewards/")]),
        "early_stopping_patience": between(0, _MAX_STEPS),
        "early_stopping_threshold": number(0, 1e6),
        "seed": between(0, MAX_SEED),
        "r": _rank(limits),
        "lora_alpha": number(0, 1e6, above=True),
        "lora_dropout": number(0, 1, below=True),
        "use_rslora": boolean,
        "target_modules": _modules,
        "rank_pattern": _pattern(_rank(limits)),
        "alpha_pattern": _pattern(number(0, 1e6, above=True)),
    }


def bad(place: str, expected: str, value: Any) -> InvalidInputError:
    shown = repr(value) if isinstance(value, int | float | bool) or value in ([], {}) else f"a {type(value).__name__}"
    if isinstance(value, str):
        shown = f"'{value[:50]}'"
    return InvalidInputError(
        f"Invalid '{place}': expected {expected}, got {shown[:60]}.", code="invalid_hyperparameters", param=place
    )


def between(low: int, high: int, note: str = "") -> Check:
    """A whole number; 3.0 will do. ``note``: what to know of the range."""

    def check(place: str, value: Any) -> int:
        whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
        if not whole or not low <= value <= high:
            raise bad(place, f"a whole number from {low} to {high}{note}", value)
        return int(value)

    return check


def number(low: float, high: float, *, above: bool = False, below: bool = False) -> Check:
    """A number in a closed range, or without the lower bound (``above``) or the upper one (``below``)."""
    expected = f"a number {'above' if above else 'from'} {low:g} {'and below' if below else 'up to'} {high:g}"

    def check(place: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # Compared before it is converted: an integer can be too large for a float.
        if not is_number or not low <= value <= high or (above and value == low) or (below and value == high):
            raise bad(place, expected, value)
        return float(value)

    return check


def boolean(place: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise bad(place, "true or false", value)
    return value


def _only_true(place: str, value: Any) -> bool:
    if value is not True:
        raise bad(place, "true, because only the assistant's tokens are trained on", value)
    return True


def _schedule(place: str, value: Any) -> str:
    if not isinstance(value, str) or value not in SCHEDULES:
        raise bad(place, f"one of {', '.join(SCHEDULES)}", value)
    return str(value)


def _schedule_settings(place: str, value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        raise bad(place, "an object of the schedule's settings", value)
    checks = {
        "num_decay_steps": between(1, _MAX_STEPS),
        "timescale": between(1, _MAX_STEPS),
        "min_lr_rate": number(0, 1),
        "min_lr_ratio": number(0, 1),
    }
    known = {name for names in SCHEDULES.values() for name in names}
    for name in value:
        if name not in known:
            raise bad(place, f"settings out of {', '.join(sorted(known))}", name)
    return {name: checks.get(name, number(0, 1e3))(f"{place}.{name}", item) for name, item in value.items()}


def _best_metric(names: Collection[str]) -> Check:
    def check(place: str, value: Any) -> str:
        name = value.removeprefix("eval_") if isinstance(value, str) else ""
        if name not in names:
            raise bad(place, f"one of {', '.join(names)}", value)
        return name

    return check


def _sigmoid(place: str, value: Any) -> str:
    if value not in ("sigmoid", ["sigmoid"]):
        raise bad(place, "'sigmoid', the only loss there is", value)
    return "sigmoid"


def _never_packed(place: str, value: Any) -> bool:
    if value is not False:
        raise bad(place, "false, because pairs are not packed into rows", value)
    return False


def _max_steps(place: str, value: Any) -> int:
    check = between(1, _MAX_STEPS, " (or -1, as many as the epochs have)")
    return -1 if value == -1 and not isinstance(value, bool) else check(place, value)


def _rank(limits: Limits) -> Check:
    return between(1, limits.max_lora_rank, " (the server's --max-lora-rank)")


def _modules(place: str, value: Any) -> list[str]:
    """PEFT's list of names or 'all-linear'; and one name alone, which PEFT would take for a pattern."""
    if value == "all-linear":
        return list(LINEAR_MODULES)
    expected = f"'all-linear' or a list of {', '.join(LINEAR_MODULES)}"
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list):
        raise bad(place, expected, value)
    if not names:
        raise bad(place, f"{expected}, at least one", value)
    for name in names:
        if name not in LINEAR_MODULES:
            raise bad(place, expected, name)
    return [name for name in LINEAR_MODULES if name in names]


def _pattern(check: Check) -> Check:
    """PEFT's form: an object from regular expressions for the ends of module names to values."""

    def check_all(place: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise bad(place, "an object from module names or regular expressions to numbers", value)
        if len(value) > _MAX_PATTERNS:
            raise bad(place, f"at most {_MAX_PATTERNS} keys", len(value))
        checked = {}
        for key, item in value.items():
            if not _is_quick_regex(key):
                raise bad(
                    place, f"keys that are regular expressions without ( and with up to {_MAX_REPEATS} *+?{{", key
                )
            try:
                checked[key] = check(f"{place}.{key}", item)
            except InvalidInputError as error:
                raise InvalidInputError(error.message, code=error.code, param=place) from error
        return checked

    return check_all


def _is_quick_regex(text: str) -> bool:
    """Whether matching ends soon: the worker does it for every module, and requests wait meanwhile. Without groups,
    time grows with the name's length to the power of the number of repeats."""
    if not 0 < len(text) <= _MAX_PATTERN or "(" in text or len(_REPEAT.findall(text)) > _MAX_REPEATS:
        return False
    try:
        end_pattern(text)
    except (re.error, RecursionError, OverflowError):
        return False
    return True
