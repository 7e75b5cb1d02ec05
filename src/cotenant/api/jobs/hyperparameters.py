"""A job's hyperparameters: names and ranges checked when it is created, every 'auto' resolved when its size is known.

What 'auto', or nothing, becomes:

- ``n_epochs``: 3; more for fewer than 34 examples, so that about 100 are seen in all, but at most 25.
- ``batch_size``: a fiftieth of the examples, rounded down to a power of two, between 4 and 32.
- ``learning_rate``: ``learning_rate_multiplier`` (1) times 2e-4.
- ``lora_alpha``: twice ``r``.
- ``max_length``: the model's context, or with ``packing`` 2,048 or the longest example if that is longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from cotenant.core.errors import InvalidInputError
from cotenant.core.job import LINEAR_MODULES, SCHEDULES, Hyperparameters

AUTO = "auto"
BASE_LEARNING_RATE = 2e-4
MAX_SEED = 2**31 - 1

_DEFAULTS = Hyperparameters()
_MIN_EXAMPLES_SEEN = 100
_MAX_AUTO_EPOCHS = 25
_AUTO_BATCH_SIZES = (4, 32)
_STEPS_PER_EPOCH = 50

_MAX_EPOCHS = 1000
_MAX_BATCH_SIZE = 4096
_MAX_STEPS = 10_000_000

_ALIASES = {"num_train_epochs": "n_epochs"}
_CAN_BE_AUTO = ("n_epochs", "batch_size", "learning_rate_multiplier", "max_length", "lora_alpha")

Check = Callable[[str, Any], Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server allows. ``max_model_len``: tokens; ``max_lora_rank``: of the adapters that it serves."""

    max_model_len: int
    max_lora_rank: int


@dataclass(frozen=True, slots=True)
class DatasetSize:
    """What resolving needs to know of the training file. ``max_tokens``: of its longest example."""

    num_examples: int
    max_tokens: int


def check_hyperparameters(given: Mapping[str, Any], limits: Limits, param: str) -> dict[str, Any]:
    """``given`` with aliases replaced and every value checked; 'auto' stays where it means something.

    ``param`` is where they stand in the request. Raises InvalidInputError that names the one that is wrong.
    """
    checks = _checks(limits)
    checked: dict[str, Any] = {}
    for name, value in given.items():
        place = f"{param}.{name[:100]}"
        if name not in checks:
            raise InvalidInputError(
                f"Unknown hyperparameter '{name[:100]}'. Known are: {', '.join(sorted(checks))}.",
                code="unknown_parameter",
                param=place,
            )
        if value is None:
            continue
        target = _ALIASES.get(name, name)
        result = AUTO if value == AUTO and target in _CAN_BE_AUTO else checks[name](place, value)
        if target in checked and checked[target] != result:
            raise _conflict(f"'{name}' and '{target}' mean the same, but have different values", place)
        checked[target] = result
    return _without_contradictions(checked, param)


def resolve(requested: Mapping[str, Any], size: DatasetSize, limits: Limits) -> Hyperparameters:
    """The settings of a job from its checked hyperparameters. Nothing is 'auto' any more."""
    given = {name: value for name, value in requested.items() if value != AUTO}
    multiplier = given.pop("learning_rate_multiplier", 1.0)
    given.setdefault("learning_rate", BASE_LEARNING_RATE * multiplier)
    given.setdefault("n_epochs", _auto_epochs(size.num_examples))
    given.setdefault("batch_size", _auto_batch_size(size.num_examples))
    given.setdefault("lora_alpha", 2.0 * given.get("r", _DEFAULTS.r))
    given.setdefault("max_length", _auto_length(size, limits, given.get("packing", False)))
    if "target_modules" in given:
        given["target_modules"] = tuple(given["target_modules"])
    return Hyperparameters(**given)


def as_requested(hyperparameters: Hyperparameters) -> dict[str, Any]:
    """Resolved settings under the names that a client may send."""
    values: dict[str, Any] = {
        field.name: getattr(hyperparameters, field.name) for field in fields(hyperparameters) if field.name != "seed"
    }
    values["target_modules"] = list(hyperparameters.target_modules)
    values["learning_rate_multiplier"] = round(hyperparameters.learning_rate / BASE_LEARNING_RATE, 9)
    return values


def _auto_epochs(num_examples: int) -> int:
    return min(_MAX_AUTO_EPOCHS, max(_DEFAULTS.n_epochs, math.ceil(_MIN_EXAMPLES_SEEN / num_examples)))


def _auto_batch_size(num_examples: int) -> int:
    smallest, largest = _AUTO_BATCH_SIZES
    wanted = max(1, num_examples // _STEPS_PER_EPOCH)
    return min(largest, max(smallest, 1 << (wanted.bit_length() - 1)))


def _auto_length(size: DatasetSize, limits: Limits, packing: bool) -> int:
    if not packing:
        return limits.max_model_len
    return min(limits.max_model_len, max(_DEFAULTS.max_length, size.max_tokens))


def _without_contradictions(checked: dict[str, Any], param: str) -> dict[str, Any]:
    """Fold what can be said in two ways into one; refuse it where the two differ."""
    per_device = checked.pop("per_device_train_batch_size", None)
    accumulation = checked.pop("gradient_accumulation_steps", None)
    if per_device is not None or accumulation is not None:
        if per_device is None:
            raise _conflict(
                "'gradient_accumulation_steps' needs 'per_device_train_batch_size' beside it; or give 'batch_size'",
                f"{param}.gradient_accumulation_steps",
            )
        product = _between(1, _MAX_BATCH_SIZE)(f"{param}.per_device_train_batch_size", per_device * (accumulation or 1))
        if checked.get("batch_size", AUTO) not in (AUTO, product):
            raise _conflict(
                f"'batch_size' is {checked['batch_size']}, but 'per_device_train_batch_size' times "
                f"'gradient_accumulation_steps' is {product}",
                f"{param}.batch_size",
            )
        checked["batch_size"] = product
    rate, multiplier = checked.get("learning_rate"), checked.get("learning_rate_multiplier", AUTO)
    if rate is not None and multiplier != AUTO and not math.isclose(rate, BASE_LEARNING_RATE * multiplier):
        raise _conflict(
            f"'learning_rate' is {rate:g}, but 'learning_rate_multiplier' {multiplier:g} stands for "
            f"{BASE_LEARNING_RATE * multiplier:g}; give one of them",
            f"{param}.learning_rate",
        )
    if rate is not None:
        checked.pop("learning_rate_multiplier", None)
    checked.pop("assistant_only_loss", None)
    return checked


def _conflict(message: str, param: str) -> InvalidInputError:
    return InvalidInputError(f"{message}.", code="invalid_hyperparameters", param=param)


def _bad(place: str, expected: str, value: Any) -> InvalidInputError:
    shown = repr(value) if isinstance(value, int | float | bool) else f"a {type(value).__name__}"
    if isinstance(value, str):
        shown = f"'{value[:50]}'"
    return InvalidInputError(
        f"Invalid '{place}': expected {expected}, got {shown[:60]}.", code="invalid_hyperparameters", param=place
    )


def _between(low: int, high: int) -> Check:
    """A whole number; 3.0 will do."""

    def check(place: str, value: Any) -> int:
        whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
        if not whole or not low <= value <= high:
            raise _bad(place, f"a whole number from {low} to {high}", value)
        return int(value)

    return check


def _number(low: float, high: float, *, above: bool = False, below: bool = False) -> Check:
    """A number in a closed range, or without the lower bound (``above``) or the upper one (``below``)."""
    expected = f"a number {'above' if above else 'from'} {low:g} {'and below' if below else 'up to'} {high:g}"

    def check(place: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # Compared before it is converted: an integer can be too large for a float.
        if not is_number or not low <= value <= high or (above and value == low) or (below and value == high):
            raise _bad(place, expected, value)
        return float(value)

    return check


def _boolean(place: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _bad(place, "true or false", value)
    return value


def _only_true(place: str, value: Any) -> bool:
    if value is not True:
        raise _bad(place, "true, because only the assistant's tokens are trained on", value)
    return True


def _schedule(place: str, value: Any) -> str:
    if value not in SCHEDULES:
        raise _bad(place, f"one of {', '.join(SCHEDULES)}", value)
    return str(value)


def _max_steps(place: str, value: Any) -> int:
    return -1 if value == -1 and not isinstance(value, bool) else _between(1, _MAX_STEPS)(place, value)


def _modules(place: str, value: Any) -> list[str]:
    """PEFT's forms: a list of names, one name, or 'all-linear'."""
    if value == "all-linear":
        return list(LINEAR_MODULES)
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or any(name not in LINEAR_MODULES for name in names):
        raise _bad(place, f"'all-linear' or a list of {', '.join(LINEAR_MODULES)}", value)
    return [name for name in LINEAR_MODULES if name in names]


def _checks(limits: Limits) -> dict[str, Check]:
    """Every name that is known, and what its value must be."""
    return {
        "n_epochs": _between(1, _MAX_EPOCHS),
        "num_train_epochs": _between(1, _MAX_EPOCHS),
        "batch_size": _between(1, _MAX_BATCH_SIZE),
        "per_device_train_batch_size": _between(1, _MAX_BATCH_SIZE),
        "gradient_accumulation_steps": _between(1, _MAX_BATCH_SIZE),
        "learning_rate_multiplier": _number(0, 1 / BASE_LEARNING_RATE, above=True),
        "learning_rate": _number(0, 1, above=True),
        "lr_scheduler_type": _schedule,
        "warmup_ratio": _number(0, 1),
        "warmup_steps": _between(0, _MAX_STEPS),
        "weight_decay": _number(0, 1),
        "adam_beta1": _number(0, 1, below=True),
        "adam_beta2": _number(0, 1, below=True),
        "adam_epsilon": _number(0, 1, above=True),
        "max_grad_norm": _number(0, 1e6),
        "max_steps": _max_steps,
        "max_length": _between(2, limits.max_model_len),
        "packing": _boolean,
        "assistant_only_loss": _only_true,
        "eval_steps": _between(0, _MAX_STEPS),
        "save_steps": _between(0, _MAX_STEPS),
        "seed": _between(0, MAX_SEED),
        "r": _between(1, limits.max_lora_rank),
        "lora_alpha": _number(0, 1e6, above=True),
        "lora_dropout": _number(0, 1, below=True),
        "use_rslora": _boolean,
        "target_modules": _modules,
    }
