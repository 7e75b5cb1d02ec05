"""A job's tokenised files, checked against what the job wants to do with them."""

from __future__ import annotations

import logging
from pathlib import Path

from cotenant.core.errors import InvalidInputError
from cotenant.core.job import DPO, JobSpec
from cotenant.finetune.dataset import Dataset, load_dataset
from cotenant.finetune.evaluation import ValidationSet
from cotenant.finetune.preference import PreferenceLoss
from cotenant.finetune.preference_evaluation import PreferenceValidationSet
from cotenant.models.spec import ModelSpec

logger = logging.getLogger(__name__)


def load_training(spec: JobSpec, model: ModelSpec) -> Dataset:
    """The training examples.

    Raises:
        InvalidInputError: they cannot be used, or nothing of them counts in the loss.
    """
    max_length = _max_length(spec, model)
    dataset = load_dataset(Path(spec.dataset_path), max_length, model.vocab_size)
    if not dataset.trainable:
        raise InvalidInputError(
            f"No token of the training file counts in the loss once examples are cut to max_length={max_length}: "
            "all loss weights are 0. Check the 'weight' of the assistant messages, or raise max_length.",
            code="invalid_training_file",
        )
    if spec.hyperparameters.method == DPO:
        _check_pairs(dataset, max_length, "training")
    return dataset


def load_validation(
    spec: JobSpec, model: ModelSpec, max_tasklet_tokens: int
) -> ValidationSet | PreferenceValidationSet | None:
    """The validation examples; None where there are none, or nothing of them can be measured.

    Raises:
        InvalidInputError: they cannot be used.
    """
    if spec.validation_path is None:
        return None
    hyper = spec.hyperparameters
    max_length = _max_length(spec, model)
    dataset = load_dataset(Path(spec.validation_path), max_length, model.vocab_size)
    if not dataset.trainable:
        logger.warning("Job %s: nothing to measure in the validation file; going without", spec.job_id)
        return None
    if hyper.method == DPO:
        _check_pairs(dataset, max_length, "validation")
        return PreferenceValidationSet(
            dataset,
            PreferenceLoss(hyper.beta, hyper.label_smoothing),
            batch_size=hyper.batch_size,
            seed=hyper.seed,
            max_tasklet_tokens=max_tasklet_tokens,
        )
    return ValidationSet(dataset, batch_size=hyper.batch_size, seed=hyper.seed, max_tasklet_tokens=max_tasklet_tokens)


def _max_length(spec: JobSpec, model: ModelSpec) -> int:
    return min(spec.hyperparameters.max_length, model.max_position_embeddings)


def _check_pairs(dataset: Dataset, max_length: int, kind: str) -> None:
    """A pair of which an answer was cut off says nothing of what is preferred."""
    lost = next((sequence for sequence, count in enumerate(dataset.num_targets) if count == 0), None)
    if lost is not None:
        raise InvalidInputError(
            f"Example {lost // 2 + 1} of the {kind} file has nothing left of its "
            f"{'rejected' if lost % 2 else 'preferred'} answer once it is cut to max_length={max_length}. Raise "
            "max_length, or shorten its prompt.",
            code=f"invalid_{kind}_file",
        )
    if len(dataset) % 2:
        raise InvalidInputError(f"The {kind} file does not hold pairs.", code=f"invalid_{kind}_file")
