"""Hyperparameters: what is accepted, what is refused by name, and what 'auto' becomes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.api.jobs.hyperparameters import DatasetSize, as_requested, check_hyperparameters, resolve
from cotenant.api.jobs.values import Limits
from cotenant.core.errors import InvalidInputError
from cotenant.core.job import LINEAR_MODULES, Hyperparameters

LIMITS = Limits(max_model_len=512, max_lora_rank=64, num_layers=4)
SIZE = DatasetSize(num_examples=400, num_tokens=20_000, max_tokens=100)


def resolved(**given: Any) -> Hyperparameters:
    checked = check_hyperparameters({"hyperparameters": given}, LIMITS)
    stored = json.loads(json.dumps(checked))  # it is resolved later, from the database
    return resolve(stored, SIZE, LIMITS)


def test_nothing_given_is_sensible() -> None:
    assert resolved() == Hyperparameters(n_epochs=3, batch_size=8, learning_rate=2e-4, max_length=512)


@pytest.mark.parametrize(
    ("num_examples", "n_epochs", "batch_size"),
    [(10, 10, 4), (1, 25, 4), (33, 4, 4), (34, 3, 4), (399, 3, 4), (400, 3, 8), (1600, 3, 32), (10**6, 3, 32)],
)
def test_auto_follows_the_number_of_examples(num_examples: int, n_epochs: int, batch_size: int) -> None:
    settings = resolve(
        {"n_epochs": "auto", "batch_size": "auto"}, DatasetSize(num_examples, 10 * num_examples, 10), LIMITS
    )
    assert (settings.n_epochs, settings.batch_size) == (n_epochs, batch_size)


def test_with_packing_auto_counts_rows() -> None:
    """Else an epoch would be a few steps of all rows."""
    size = DatasetSize(10_000, 400_000, 60)
    assert resolve({}, size, LIMITS).batch_size == 32
    assert resolve({"packing": True, "max_length": 2000}, size, LIMITS).batch_size == 4
    assert resolve({"packing": True, "max_length": 500}, size, LIMITS).batch_size == 16


def test_trl_and_peft_names() -> None:
    settings = resolved(
        num_train_epochs=2.0,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_ratio=0.1,
        weight_decay=0.01,
        max_grad_norm=0.5,
        max_steps=50,
        max_length=128,
        packing=True,
        assistant_only_loss=True,
        eval_steps=5,
        save_steps=10,
        r=8,
        lora_dropout=0.1,
        target_modules=["v_proj", "q_proj"],
        use_rslora=True,
    )
    assert settings == Hyperparameters(
        n_epochs=2,
        batch_size=12,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_ratio=0.1,
        weight_decay=0.01,
        max_grad_norm=0.5,
        max_steps=50,
        max_length=128,
        packing=True,
        eval_steps=5,
        save_steps=10,
        r=8,
        lora_alpha=16.0,
        lora_dropout=0.1,
        target_modules=("q_proj", "v_proj"),
        use_rslora=True,
    )


def test_learning_rate_multiplier_scales_the_base_rate() -> None:
    assert resolved(learning_rate_multiplier=0.5).learning_rate == pytest.approx(1e-4)
    assert as_requested(resolved(learning_rate=1e-3))["learning_rate_multiplier"] == pytest.approx(5.0)
    assert resolved(learning_rate=1e-4, learning_rate_multiplier="auto").learning_rate == 1e-4
    assert resolved(learning_rate=1e-4, learning_rate_multiplier=0.5).learning_rate == 1e-4


def test_a_module_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidInputError, match="got 'lm_head'"):
        resolved(target_modules=["q_proj", "lm_head"])


def test_target_modules_in_pefts_forms() -> None:
    assert resolved(target_modules="all-linear").target_modules == LINEAR_MODULES
    assert resolved(target_modules="q_proj").target_modules == ("q_proj",)


def test_early_stopping_exports_the_best_step_unless_told_otherwise() -> None:
    assert resolved(early_stopping_patience=2).load_best_model_at_end
    assert not resolved(early_stopping_patience=2, load_best_model_at_end=False).load_best_model_at_end
    assert not resolved().load_best_model_at_end
    settings = resolved(metric_for_best_model="eval_mean_token_accuracy", early_stopping_patience=2)
    assert settings.metric_for_best_model == "mean_token_accuracy"


@pytest.mark.parametrize(
    ("given", "lacks"),
    [
        ({"early_stopping_threshold": 0.1}, "'early_stopping_patience'"),
        ({"early_stopping_threshold": 0.1, "load_best_model_at_end": True}, "'early_stopping_patience'"),
        ({"metric_for_best_model": "mean_token_accuracy"}, "'load_best_model_at_end' or 'early_stopping_patience'"),
        ({"metric_for_best_model": "mean_token_accuracy", "early_stopping_patience": 0}, "'load_best_model_at_end' or"),
    ],
)
def test_a_setting_of_a_comparison_that_nobody_makes_is_refused(given: dict[str, Any], lacks: str) -> None:
    with pytest.raises(InvalidInputError, match=f"does nothing without {lacks}") as refused:
        resolved(**given)
    assert refused.value.param == f"hyperparameters.{next(iter(given))}"


def test_a_comparison_may_be_asked_for_by_either_setting() -> None:
    assert resolved(metric_for_best_model="mean_token_accuracy", load_best_model_at_end=True)
    assert resolved(metric_for_best_model="eval_loss", early_stopping_threshold=0.0)  # defaults
    assert resolved(early_stopping_patience=1, early_stopping_threshold=0.1)


def test_packing_keeps_rows_short_unless_an_example_is_longer() -> None:
    limits = Limits(max_model_len=100_000, max_lora_rank=64, num_layers=4)
    assert resolve({"packing": True}, DatasetSize(10, 1000, 300), limits).max_length == 2048
    assert resolve({"packing": True}, DatasetSize(10, 9000, 3000), limits).max_length == 3000
    assert resolve({}, DatasetSize(10, 1000, 300), limits).max_length == 100_000


def test_the_rank_that_nobody_gave_is_one_that_the_server_serves() -> None:
    for most, r in ((64, 16), (16, 16), (8, 8), (1, 1)):
        settings = resolve({}, SIZE, Limits(max_model_len=512, max_lora_rank=most, num_layers=4))
        assert (settings.r, settings.lora_alpha) == (r, 2.0 * r)


@given(st.floats(1e-300, 1e6))
def test_any_learning_rate_can_be_sent_again(rate: float) -> None:
    settings = resolved(learning_rate=rate)
    assert resolved(**as_requested(settings)) == settings
    settings = resolved_dpo(learning_rate=rate)
    assert resolved_dpo(**as_requested(settings)) == settings


def test_what_is_echoed_can_be_sent_again() -> None:
    patterns = {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {r"layers\.[0-9]+\.self_attn\.q_proj|k_proj": 3.5}}
    schedule = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 5}}
    settings = resolved(
        r=4,
        target_modules="q_proj",
        learning_rate=3e-4,
        packing=True,
        early_stopping_patience=3,
        metric_for_best_model="eval_loss",
        **schedule,
        **patterns,
    )
    assert resolved(**as_requested(settings)) == settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_epochs", 0), ("n_epochs", -3), ("n_epochs", 2.5), ("n_epochs", True), ("n_epochs", "3"),
        ("n_epochs", 10**30),
        ("num_train_epochs", "auto "), ("batch_size", 0), ("batch_size", 1e300), ("learning_rate", 0),
        ("learning_rate", -1e-4), ("learning_rate", 2e6), ("learning_rate", 10**400), ("learning_rate", "auto"),
        ("learning_rate_multiplier", 0), ("learning_rate_multiplier", 1e13), ("lr_scheduler_type", "random"),
        ("lr_scheduler_type", 3), ("lr_scheduler_type", ["linear"]), ("warmup_ratio", 1.5), ("warmup_steps", -1),
        ("weight_decay", -0.1), ("adam_beta1", 1.0), ("adam_epsilon", 0), ("max_grad_norm", -1), ("max_steps", 0),
        ("max_steps", -2), ("max_length", 513), ("max_length", 1), ("packing", "yes"), ("packing", 1),
        ("assistant_only_loss", False), ("eval_steps", 0.5), ("save_steps", -1), ("seed", -1), ("seed", 2**31),
        ("r", 0), ("r", 65), ("lora_alpha", 0), ("lora_dropout", 1.0), ("use_rslora", "no"),
        ("target_modules", []), ("target_modules", ["q_proj", "lm_head"]), ("target_modules", {"q_proj": 1}),
        ("target_modules", [["q_proj"]]), ("lr_scheduler_kwargs", 3), ("lr_scheduler_kwargs", {"magic": 1}),
        ("rank_pattern", {"q_proj": 0}), ("rank_pattern", {"q_proj": 65}), ("rank_pattern", {"(": 4}),
        ("rank_pattern", {"": 4}), ("rank_pattern", ["q_proj"]), ("rank_pattern", 8),
        ("rank_pattern", {"(.+)+x": 4}), ("rank_pattern", {".*.*.*.*x": 4}),
        ("rank_pattern", {"(|)" * 22 + "!": 4}), ("rank_pattern", {"(?x:(.+) +!)": 4}),
        ("alpha_pattern", {"(?i)Q_PROJ": 4}), ("alpha_pattern", {"q_proj\\": 4}), ("alpha_pattern", {"q_proj)": 4}),
        ("rank_pattern", {f"layers.{layer}.self_attn.q_proj": 4 for layer in range(65)}),
        ("load_best_model_at_end", 1), ("metric_for_best_model", "train_loss"), ("metric_for_best_model", 3),
        ("early_stopping_patience", -1), ("early_stopping_threshold", -0.1),
        ("rank_pattern", {"foo_proj": 4}), ("rank_pattern", {"layers.4.self_attn.q_proj": 4}),
        ("alpha_pattern", {"q_proj": 0}), ("alpha_pattern", {"q_proj": "8"}), ("adam_epsilon", 1e-60),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"hyperparameters.{name}") as refused:
        resolved(**{name: value})
    assert refused.value.param == f"hyperparameters.{name}"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"target_modules": []}, "at least one, got []."),
        ({"warmup_steps": 0.1}, "(a share of all steps is warmup_ratio), got 0.1."),
    ],
)
def test_what_to_give_instead_is_said(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        resolved(**given)
    assert refused.value.message.endswith(said)


@pytest.mark.parametrize("name", ["learning_rte", "bias", "use_dora", "modules_to_save", "optim", ""])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"Unknown hyperparameter '{name}'") as refused:
        resolved(**{name: 1})
    assert refused.value.param == f"hyperparameters.{name}"


@pytest.mark.parametrize(
    "given",
    [
        {"batch_size": 8, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
        {"gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 4096, "gradient_accumulation_steps": 2},
        {"n_epochs": 2, "num_train_epochs": 3},
        {"learning_rate": 1e-3, "learning_rate_multiplier": 1},
        {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"power": 1}},
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": "high"}},
        {"lr_scheduler_type": "warmup_stable_decay"},
        {"lr_scheduler_type": "cosine_with_min_lr"},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0, "min_lr_rate": 0}},
        {"lr_scheduler_type": "polynomial", "learning_rate": 1e-8},
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1e-3}},
    ],
)
def test_contradictions_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        resolved(**given)


def test_a_batch_that_is_too_large_is_named_by_both_its_factors() -> None:
    with pytest.raises(InvalidInputError) as refused:
        resolved(per_device_train_batch_size=8, gradient_accumulation_steps=1024)
    assert refused.value.message == (
        "'per_device_train_batch_size' (8) times 'gradient_accumulation_steps' (1024) is 8192, and a batch has at most "
        "4096."
    )
    assert refused.value.param == "hyperparameters.per_device_train_batch_size"


@pytest.mark.parametrize(
    ("name", "settings", "rates", "says"),
    [
        ("polynomial", {}, {"learning_rate": 1e-8}, "lr_end=1e-07, which must be below the learning rate of 1e-08"),
        ("polynomial", {"lr_end": 2e-4}, {}, "ends at lr_end=0.0002"),
        ("polynomial", {"lr_end": 1e-3}, {"learning_rate_multiplier": 2}, "below the learning rate of 0.0004"),
        ("cosine_with_min_lr", {"min_lr": 1.0}, {"learning_rate": 1e-4}, "ends at min_lr=1"),
        ("cosine_with_min_lr", {"min_lr": 2e-4}, {"learning_rate_multiplier": "auto"}, "of 0.0002"),
        ("cosine_with_min_lr", {"min_lr_rate": 1.5}, {}, "'hyperparameters.lr_scheduler_kwargs.min_lr_rate': expected"),
        ("warmup_stable_decay", {"num_decay_steps": 2, "min_lr_ratio": 3}, {}, "lr_scheduler_kwargs.min_lr_ratio'"),
    ],
)  # fmt: skip
def test_a_schedule_that_would_not_fall_is_refused_when_the_job_is_created(
    name: str, settings: dict[str, Any], rates: dict[str, Any], says: str
) -> None:
    given = {"lr_scheduler_type": name, "lr_scheduler_kwargs": settings, **rates}
    with pytest.raises(InvalidInputError, match=re.escape(says)) as refused:
        check_hyperparameters({"hyperparameters": {name: v for name, v in given.items() if v != {}}}, LIMITS)
    assert refused.value.param is not None
    assert refused.value.param.startswith("hyperparameters.lr_scheduler_")


def test_schedules_may_fall_to_any_lower_rate() -> None:
    for settings in ({"min_lr": 1e-4}, {"min_lr": 0}, {"min_lr_rate": 1}, {"min_lr_rate": 0}):
        assert resolved(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs=settings)
    assert resolved(lr_scheduler_type="polynomial", lr_scheduler_kwargs={"lr_end": 1e-4})


def test_a_pattern_fits_something_that_is_trained() -> None:
    with pytest.raises(InvalidInputError, match="'q_proj' fits none of the modules that are trained"):
        resolved(rank_pattern={"q_proj": 4}, target_modules=["k_proj"])
    assert resolved(rank_pattern={"q_proj": 4}, target_modules=["k_proj", "q_proj"])
    assert resolved(alpha_pattern={"layers.[0-9]+.nothing": 4}), "left to the worker, who can stop"


def test_a_name_that_is_nearly_right_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"'learning_rat'\. Did you mean 'learning_rate'\? Known are: adam_"):
        resolved(learning_rat=1e-4)
    with pytest.raises(InvalidInputError, match=r"'zzz'\. Known are"):
        resolved(zzz=1)


@pytest.mark.parametrize("schedule", ["linear", "cosine_with_min_lr"])
def test_a_multiplier_that_stands_for_no_rate_is_refused(schedule: str) -> None:
    given: dict[str, Any] = {"learning_rate_multiplier": 1e-320, "lr_scheduler_type": schedule}
    if schedule == "cosine_with_min_lr":
        given["lr_scheduler_kwargs"] = {"min_lr": 0}
    with pytest.raises(InvalidInputError, match="stands for a learning rate of 0") as refused:
        check_hyperparameters({"hyperparameters": given}, LIMITS)
    assert refused.value.param == "hyperparameters.learning_rate_multiplier"


@pytest.mark.parametrize(
    ("first", "second", "param"),
    [
        ({"learning_rate_multiplier": 2}, {"learning_rate": 1e-3}, "hyperparameters.learning_rate"),
        ({"learning_rate": 1e-3}, {"learning_rate_multiplier": 2}, "method.learning_rate"),
        ({"batch_size": 8}, {"per_device_train_batch_size": 4}, "method.batch_size"),
        ({"num_train_epochs": 1}, {"n_epochs": 2}, "hyperparameters.n_epochs"),
        ({"lr_scheduler_kwargs": {"power": 2}}, {"lr_scheduler_type": "linear"}, "method.lr_scheduler_kwargs"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, {}, "method.lr_scheduler_type"),
    ],
)
def test_two_places_may_not_contradict_each_other(first: dict[str, Any], second: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        check_hyperparameters({"method": first, "hyperparameters": second}, LIMITS)
    assert refused.value.param == param


def test_two_places_complete_each_other() -> None:
    halves: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"lr_scheduler_type": "polynomial"}, {"lr_scheduler_kwargs": {"power": 2.0}}),
        ({"gradient_accumulation_steps": 2}, {"per_device_train_batch_size": 4}),
        ({"learning_rate": 4e-4}, {"learning_rate_multiplier": 2}),
    ]
    for first, second in halves:
        both = check_hyperparameters({"method": first, "hyperparameters": second}, LIMITS)
        assert both == check_hyperparameters({"method": {**first, **second}}, LIMITS)


def test_saying_the_same_twice_is_no_contradiction() -> None:
    assert resolved(batch_size=8, per_device_train_batch_size=2, gradient_accumulation_steps=4).batch_size == 8
    assert resolved(batch_size="auto", per_device_train_batch_size=2).batch_size == 2
    assert resolved(n_epochs=2, num_train_epochs=2).n_epochs == 2


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
_NAMES = st.sampled_from([*Hyperparameters.__dataclass_fields__, "num_train_epochs", "learning_rate_multiplier"])


@given(st.dictionaries(_NAMES, _JSON, max_size=4))
def test_any_json_is_either_refused_or_resolved(given: dict[str, Any]) -> None:
    try:
        settings = resolved(**given)
    except InvalidInputError:
        return
    assert 0 < settings.learning_rate < float("inf")
    assert settings.batch_size >= 1
    assert 2 <= settings.max_length <= LIMITS.max_model_len
    assert set(settings.target_modules) <= set(LINEAR_MODULES)


def resolved_dpo(**given: Any) -> Hyperparameters:
    checked = check_hyperparameters({"hyperparameters": given}, LIMITS, "dpo")
    return resolve(json.loads(json.dumps({"method": "dpo", **checked})), SIZE, LIMITS)


def test_dpo_has_its_own_settings() -> None:
    settings = resolved_dpo(beta="auto", learning_rate_multiplier=2, loss_type="sigmoid", label_smoothing=0.1)
    assert (settings.method, settings.beta, settings.label_smoothing) == ("dpo", 0.1, 0.1)
    assert settings.learning_rate == pytest.approx(4e-5)
    assert resolved_dpo(**as_requested(settings)) == settings
    assert resolved_dpo(loss_type=["sigmoid"], packing=False, beta=0.3).beta == 0.3
    settings = resolved_dpo(metric_for_best_model="eval_rewards/accuracies", load_best_model_at_end=True)
    assert settings.metric_for_best_model == "rewards/accuracies"
    assert not {"beta", "label_smoothing", "method"} & as_requested(resolved()).keys()


@pytest.mark.parametrize(
    ("name", "value"),
    [("beta", 0), ("beta", -1), ("beta", "low"), ("beta", 1e9), ("label_smoothing", 0.5), ("loss_type", "ipo"),
     ("loss_type", {}), ("packing", True), ("metric_for_best_model", "rewards/chosen")],
)  # fmt: skip
def test_dpo_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidInputError) as refused:
        resolved_dpo(**{name: value})
    assert refused.value.param == f"hyperparameters.{name}"


def test_what_belongs_to_dpo_is_unknown_elsewhere() -> None:
    for name, value in (("beta", 0.1), ("label_smoothing", 0.1), ("loss_type", "sigmoid")):
        with pytest.raises(InvalidInputError, match=f"'{name}' for method 'supervised': it belongs to method 'dpo'"):
            resolved(**{name: value})
    with pytest.raises(InvalidInputError, match="loss, mean_token_accuracy"):
        resolved(metric_for_best_model="rewards/margins")
