"""A job's tokenised files, checked against what the job wants to do with them."""

from __future__ import annotations

from pathlib import Path

import torch

from cotenant.core.errors import InvalidInputError
from cotenant.core.job import DPO, JobSpec
from cotenant.finetune.dataset import Dataset, load_dataset
from cotenant.finetune.evaluation import ValidationSet
from cotenant.finetune.preference import PreferenceLoss
from cotenant.finetune.preference_evaluation import PreferenceValidationSet
from cotenant.models.spec import ModelSpec


def load_training(spec: JobSpec, model: ModelSpec) -> Dataset:
    """The training examples.

    Raises:
        InvalidInputError: they cannot be used, or nothing of them counts in the loss.
    """
    max_length = _max_length(spec, model)
    dataset = load_dataset(Path(spec.dataset_path), max_length, model.vocab_size)
    if spec.hyperparameters.method == DPO:
        _check_pairs(dataset, max_length, "training")
    if not dataset.trainable:
        raise _unusable("training", f"There is nothing to train on in the training file: {_nothing_counts(max_length)}")
    return dataset


def load_validation(
    spec: JobSpec, model: ModelSpec, max_tasklet_tokens: int
) -> ValidationSet | PreferenceValidationSet | None:
    """The validation examples; None where there are none, or nothing of them can be measured.

    Raises:
        InvalidInputError: they cannot be used, or nothing of them can be measured and the job compares steps by them.
    """
    if spec.validation_path is None:
        return None
    hyper = spec.hyperparameters
    max_length = _max_length(spec, model)
    dataset = load_dataset(Path(spec.validation_path), max_length, model.vocab_size)
    if hyper.method == DPO:
        _check_pairs(dataset, max_length, "validation")
    if not dataset.trainable:
        if hyper.selects:
            raise _unusable(
                "validation",
                f"Steps cannot be compared on the validation file: {_nothing_counts(max_length)} Or leave "
                "early_stopping_patience and load_best_model_at_end out.",
            )
        return None
    if hyper.method == DPO:
        return PreferenceValidationSet(
            dataset,
            PreferenceLoss(hyper.beta, hyper.label_smoothing),
            batch_size=hyper.batch_size,
            seed=hyper.seed,
            max_tasklet_tokens=max_tasklet_tokens,
        )
    return ValidationSet(dataset, batch_size=hyper.batch_size, seed=hyper.seed, max_tasklet_tokens=max_tasklet_tokens)


def unmeasured(spec: JobSpec, model: ModelSpec) -> str:
    """What to tell a job's owner whose validation file ``load_validation`` found nothing in."""
    problem = _nothing_counts(_max_length(spec, model))
    return f"The job goes on without validation: there is nothing to measure in the validation file: {problem}"


def _nothing_counts(max_length: int) -> str:
    return (
        f"no token counts in the loss once examples are cut to max_length={max_length}. Check the 'weight' of the "
        "assistant messages, or raise max_length."
    )


def _max_length(spec: JobSpec, model: ModelSpec) -> int:
    return min(spec.hyperparameters.max_length, model.max_position_embeddings)


def _check_pairs(dataset: Dataset, max_length: int, kind: str) -> None:
    """A pair of which an answer was cut off, or both after the same tokens, says nothing of what is preferred."""
    lost = next((sequence for sequence, count in enumerate(dataset.num_targets) if count == 0), None)
    if lost is not None:
        raise _unusable(
            kind,
            f"Line {lost // 2 + 1} of the {kind} file has nothing left of its "
            f"{'rejected' if lost % 2 else 'preferred'} answer once it is cut to max_length={max_length}. Raise "
            "max_length, or shorten its prompt.",
        )
    if len(dataset) % 2:
        raise _unusable(kind, f"The {kind} file does not hold pairs.")
    for chosen in range(0, len(dataset), 2):
        if torch.equal(dataset[chosen].token_ids, dataset[chosen + 1].token_ids):
            raise _unusable(
                kind,
                f"Line {chosen // 2 + 1} of the {kind} file has the same tokens left of its preferred and its rejected "
                f"answer once they are cut to max_length={max_length}. Raise max_length, or shorten its prompt.",
            )


def _unusable(kind: str, message: str) -> InvalidInputError:
    return InvalidInputError(message, code=f"invalid_{kind}_file", param=f"{kind}_file")
