"""A job's hyperparameters: names and ranges checked when it is created, every 'auto' resolved when its size is known.

What 'auto', or nothing, becomes:

- ``n_epochs``: 3; more for fewer than 34 examples, so that about 100 are seen in all, but at most 25.
- ``batch_size``: a fiftieth of the examples, rounded down to a power of two, between 4 and 32.
- ``learning_rate``: ``learning_rate_multiplier`` (1) times 2e-4, or times 2e-5 with method 'dpo'.
- ``beta`` of method 'dpo': 0.1.
- ``r``: 16, or the largest rank that the server serves if that is less.
- ``lora_alpha``: twice ``r``.
- ``load_best_model_at_end``: true with ``early_stopping_patience``, else false.
- ``max_length``: the model's context, or with ``packing`` 2,048 or the longest example if that is longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from cotenant.api.jobs.values import DPO_ONLY, MAX_BATCH_SIZE, Limits, checks_of
from cotenant.core.errors import InvalidInputError
from cotenant.core.job import DEFAULT_LR_END, DPO, LINEAR_MODULES, SCHEDULES, SUPERVISED, Hyperparameters
from cotenant.core.module_pattern import check_pattern, module_name

AUTO = "auto"
# What a ``learning_rate_multiplier`` of 1 stands for.
BASE_LEARNING_RATES = {SUPERVISED: 2e-4, DPO: 2e-5}

_DEFAULTS = Hyperparameters()
_MIN_EXAMPLES_SEEN = 100
_MAX_AUTO_EPOCHS = 25
_AUTO_BATCH_SIZES = (4, 32)
_STEPS_PER_EPOCH = 50

# What schedules that fall to a rate call it, and where it lies if nothing is given.
_END_RATES = {"polynomial": ("lr_end", DEFAULT_LR_END), "cosine_with_min_lr": ("min_lr", 0.0)}

_ALIASES = {"num_train_epochs": "n_epochs"}
# What others call them, for the one who asks; and how near a name is that may be meant.
_MEANT = {"lr": "learning_rate", "epochs": "n_epochs", "rank": "r", "lora_r": "r", "lora_rank": "r"}
_NEAR = 0.75
_CAN_BE_AUTO = ("n_epochs", "batch_size", "learning_rate_multiplier", "max_length", "lora_alpha", "beta")


@dataclass(frozen=True, slots=True)
class DatasetSize:
    """What resolving needs to know of the training file. ``num_tokens``: of all its examples; ``max_tokens``: of the
    longest."""

    num_examples: int
    num_tokens: int
    max_tokens: int


def check_hyperparameters(
    given: Mapping[str, Mapping[str, Any]], limits: Limits, method: str = SUPERVISED
) -> dict[str, Any]:
    """All of ``given`` as one, with aliases replaced and every value checked; 'auto' stays where it means something.

    ``given`` has the hyperparameters by where they stand in the request. Raises InvalidInputError that names the one
    that is wrong, or contradicts another, be it in another place.
    """
    checks = checks_of(limits, method)
    checked: dict[str, Any] = {}
    places: dict[str, str] = {}
    for param, part in given.items():
        for name, value in part.items():
            place = f"{param}.{name[:100]}"
            if name not in checks:
                raise _unknown(name, place, checks, method)
            if value is None:
                continue
            target = _ALIASES.get(name, name)
            result = AUTO if value == AUTO and target in _CAN_BE_AUTO else checks[name](place, value)
            if target in checked and checked[target] != result:
                raise _conflict(f"'{places[target]}' and '{place}' have different values; give one of them", place)
            checked[target] = result
            places[target] = place
    checked = _without_contradictions(checked, places, method)
    _check_patterns(checked, places, limits)
    return checked


def resolve(requested: Mapping[str, Any], size: DatasetSize, limits: Limits) -> Hyperparameters:
    """The settings of a job from its checked hyperparameters. Nothing is 'auto' any more."""
    given = {name: value for name, value in requested.items() if value != AUTO}
    given["learning_rate"] = _learning_rate(given, given.get("method", SUPERVISED))
    given.pop("learning_rate_multiplier", None)
    given.setdefault("n_epochs", _auto_epochs(size.num_examples))
    given.setdefault("r", min(_DEFAULTS.r, limits.max_lora_rank))
    given.setdefault("lora_alpha", 2.0 * given["r"])
    given.setdefault("max_length", _auto_length(size, limits, given.get("packing", False)))
    # What steps are counted in: examples, or rows that are packed with them, no fewer than this.
    num_units = math.ceil(size.num_tokens / given["max_length"]) if given.get("packing") else size.num_examples
    given.setdefault("batch_size", _auto_batch_size(num_units))
    given.setdefault("load_best_model_at_end", given.get("early_stopping_patience", 0) > 0)
    if "target_modules" in given:
        given["target_modules"] = tuple(given["target_modules"])
    return Hyperparameters(**given)


def as_requested(hyperparameters: Hyperparameters) -> dict[str, Any]:
    """Resolved settings under the names that a client may send."""
    hidden = {"seed", "method"} | (set() if hyperparameters.method == DPO else set(DPO_ONLY))
    values: dict[str, Any] = {
        field.name: getattr(hyperparameters, field.name)
        for field in fields(hyperparameters)
        if field.name not in hidden
    }
    values["target_modules"] = list(hyperparameters.target_modules)
    for name in ("lr_scheduler_kwargs", "rank_pattern", "alpha_pattern"):
        values[name] = dict(values[name])
    multiplier = hyperparameters.learning_rate / BASE_LEARNING_RATES[hyperparameters.method]
    # 12 digits undo the division's error, and are more than the two are compared by when they are sent again.
    values["learning_rate_multiplier"] = float(f"{multiplier:.12g}")
    return values


def _unknown(name: str, place: str, known: Iterable[str], method: str) -> InvalidInputError:
    if method != DPO and name in (*DPO_ONLY, "loss_type"):
        message = f"Unknown hyperparameter '{name}' for method '{method}': it belongs to method '{DPO}'."
    else:
        names = sorted(known)
        near = [_MEANT[name]] if name in _MEANT else get_close_matches(name[:100], names, n=1, cutoff=_NEAR)
        meant = "".join(f" Did you mean '{each}'?" for each in near)
        message = f"Unknown hyperparameter '{name[:100]}'.{meant} Known are: {', '.join(names)}."
    return InvalidInputError(message, code="unknown_parameter", param=place)


def _learning_rate(given: Mapping[str, Any], method: str) -> float:
    """What ``learning_rate``, or ``learning_rate_multiplier``, or nothing stands for."""
    multiplier = given.get("learning_rate_multiplier", AUTO)
    rate: float = given.get("learning_rate", BASE_LEARNING_RATES[method] * (1.0 if multiplier == AUTO else multiplier))
    return rate


def _auto_epochs(num_examples: int) -> int:
    return min(_MAX_AUTO_EPOCHS, max(_DEFAULTS.n_epochs, math.ceil(_MIN_EXAMPLES_SEEN / num_examples)))


def _auto_batch_size(num_units: int) -> int:
    smallest, largest = _AUTO_BATCH_SIZES
    wanted = max(1, num_units // _STEPS_PER_EPOCH)
    return min(largest, max(smallest, 1 << (wanted.bit_length() - 1)))


def _auto_length(size: DatasetSize, limits: Limits, packing: bool) -> int:
    if not packing:
        return limits.max_model_len
    return min(limits.max_model_len, max(_DEFAULTS.max_length, size.max_tokens))


def _without_contradictions(checked: dict[str, Any], places: Mapping[str, str], method: str) -> dict[str, Any]:
    """Fold what can be said in two ways into one; refuse it where the two differ. ``places``: of each name."""
    per_device = checked.pop("per_device_train_batch_size", None)
    accumulation = checked.pop("gradient_accumulation_steps", None)
    if per_device is not None or accumulation is not None:
        if per_device is None:
            raise _conflict(
                "'gradient_accumulation_steps' needs 'per_device_train_batch_size' beside it; or give 'batch_size'",
                places["gradient_accumulation_steps"],
            )
        product = per_device * (accumulation or 1)
        if product > MAX_BATCH_SIZE:
            raise _conflict(
                f"'per_device_train_batch_size' ({per_device}) times 'gradient_accumulation_steps' ({accumulation}) is "
                f"{product}, and a batch has at most {MAX_BATCH_SIZE}",
                places["per_device_train_batch_size"],
            )
        if checked.get("batch_size", AUTO) not in (AUTO, product):
            raise _conflict(
                f"'batch_size' is {checked['batch_size']}, but 'per_device_train_batch_size' times "
                f"'gradient_accumulation_steps' is {product}",
                places["batch_size"],
            )
        checked["batch_size"] = product
    rate, multiplier = checked.get("learning_rate"), checked.get("learning_rate_multiplier", AUTO)
    base = BASE_LEARNING_RATES[method]
    if rate is not None and multiplier != AUTO and not math.isclose(rate, base * multiplier):
        raise _conflict(
            f"'learning_rate' is {rate:g}, but 'learning_rate_multiplier' {multiplier:g} stands for "
            f"{base * multiplier:g}; give one of them",
            places["learning_rate"],
        )
    if rate is not None:
        checked.pop("learning_rate_multiplier", None)
    for settled in ("assistant_only_loss", "loss_type"):
        checked.pop(settled, None)
    _check_schedule(checked, places)
    _check_rates(checked, places, method)
    _check_selection(checked, places)
    return checked


def _check_schedule(checked: Mapping[str, Any], places: Mapping[str, str]) -> None:
    """``lr_scheduler_kwargs`` must be what the schedule takes, and hold what it cannot do without."""
    name, settings = checked.get("lr_scheduler_type", _DEFAULTS.lr_scheduler_type), checked.get("lr_scheduler_kwargs")
    place = places.get("lr_scheduler_kwargs", places.get("lr_scheduler_type", ""))
    for setting in settings or {}:
        if setting not in SCHEDULES[name]:
            known = ", ".join(SCHEDULES[name]) or "none"
            raise _conflict(f"lr_scheduler_type '{name}' has no setting '{setting}'; it has: {known}", place)
    given = (settings or {}).keys()
    if name == "warmup_stable_decay" and "num_decay_steps" not in given:
        raise _conflict("lr_scheduler_type 'warmup_stable_decay' needs 'num_decay_steps' in lr_scheduler_kwargs", place)
    if name == "cosine_with_min_lr" and len(given & {"min_lr", "min_lr_rate"}) != 1:
        raise _conflict(
            "lr_scheduler_type 'cosine_with_min_lr' needs either 'min_lr' or 'min_lr_rate' in lr_scheduler_kwargs",
            place,
        )


def _check_rates(checked: Mapping[str, Any], places: Mapping[str, str], method: str) -> None:
    """Schedules divide by the learning rate, and one that falls to a rate must begin above it."""
    rate = _learning_rate(checked, method)
    if rate == 0.0:
        raise _conflict(
            f"'learning_rate_multiplier' {checked['learning_rate_multiplier']:g} stands for a learning rate of 0; give "
            "a larger one",
            places["learning_rate_multiplier"],
        )
    name, settings = checked.get("lr_scheduler_type"), checked.get("lr_scheduler_kwargs") or {}
    if name not in _END_RATES:
        return
    setting, default = _END_RATES[name]
    end = settings.get(setting, default)
    if end >= rate:
        raise _conflict(
            f"lr_scheduler_type '{name}' ends at {setting}={end:g}, which must be below the learning rate of {rate:g}; "
            "lower the one or raise the other",
            places.get("lr_scheduler_kwargs", places["lr_scheduler_type"]),
        )


def _check_selection(checked: Mapping[str, Any], places: Mapping[str, str]) -> None:
    """What says how steps are compared needs something that compares them. Defaults, which are echoed, say nothing."""
    stops = checked.get("early_stopping_patience", 0) > 0
    if checked.get("early_stopping_threshold", 0.0) > 0.0 and not stops:
        raise _conflict(
            "'early_stopping_threshold' does nothing without 'early_stopping_patience'; give that, too",
            places["early_stopping_threshold"],
        )
    metric = checked.get("metric_for_best_model", _DEFAULTS.metric_for_best_model)
    if metric != _DEFAULTS.metric_for_best_model and not (stops or checked.get("load_best_model_at_end")):
        raise _conflict(
            "'metric_for_best_model' does nothing without 'load_best_model_at_end' or 'early_stopping_patience'; give "
            "one of them, too",
            places["metric_for_best_model"],
        )


def _check_patterns(checked: Mapping[str, Any], places: Mapping[str, str], limits: Limits) -> None:
    """Keys fit something that is trained. The worker looks at those that may take long to match."""
    for name in ("rank_pattern", "alpha_pattern"):
        if name in checked:
            modules = checked.get("target_modules", LINEAR_MODULES)
            names = [module_name(layer, module) for layer in range(limits.num_layers) for module in modules]
            check_pattern(checked[name], names, places[name], only_plain=True)


def _conflict(message: str, param: str) -> InvalidInputError:
    return InvalidInputError(f"{message}.", code="invalid_hyperparameters", param=param)
