"""From the body of POST ``/v1/fine_tuning/jobs`` to a job that can be stored, or to what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from cotenant.api.jobs.hyperparameters import check_hyperparameters
from cotenant.api.jobs.values import MAX_SEED, Limits
from cotenant.api.models import unknown_model
from cotenant.config import ServerConfig
from cotenant.core.errors import InvalidInputError, NotFoundError
from cotenant.core.job import METHODS, SUPERVISED
from cotenant.store import NewJob, Store
from cotenant.store.files import missing_file
from cotenant.store.ids import new_id, short_id
from cotenant.store.jobs import JOB_ID_PREFIX

TRAINING_PURPOSE = "fine-tune"
DEFAULT_SEED = 42
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

_SUFFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class MethodSettings(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of one method."""

    hyperparameters: dict[str, Any] | None = None


class Method(msgspec.Struct, forbid_unknown_fields=True):
    """How to train."""

    type: str
    supervised: MethodSettings | None = None
    dpo: MethodSettings | None = None
    reinforcement: dict[str, Any] | None = None


class CreateJobRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body. ``hyperparameters`` is the old place for what stands in ``method`` now."""

    model: str
    training_file: str
    validation_file: str | None = None
    suffix: str | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEED)] | None = None
    metadata: dict[str, str] | None = None
    method: Method | None = None
    hyperparameters: dict[str, Any] | None = None
    integrations: list[Any] | None = None


def make_job(
    body: CreateJobRequest,
    config: ServerConfig,
    base_folder: Path | None,
    base_fingerprint: str,
    store: Store,
    limits: Limits,
) -> NewJob:
    """Check everything that can be checked before the files are read. Reads the store, so it belongs in a thread.

    Raises InvalidInputError, or NotFoundError for an unknown model.
    """
    _check_model(body.model, config, store)
    suffix = _check_suffix(body.suffix)
    _check_metadata(body.metadata)
    if body.integrations:
        raise InvalidInputError(
            "'integrations' is not supported by this server; leave it out.",
            code="unsupported_parameter",
            param="integrations",
        )
    requested = _requested(body, limits)
    _check_file(body.training_file, "training_file", store)
    if body.validation_file is not None:
        _check_file(body.validation_file, "validation_file", store)
    else:
        _check_needs_no_validation(requested)
    job_id = new_id(JOB_ID_PREFIX)
    base = config.model.name
    return NewJob(
        id=job_id,
        model=base,
        base_root=_base_root(config.model.model, base_folder),
        base_fingerprint=base_fingerprint,
        training_file=body.training_file,
        validation_file=body.validation_file,
        suffix=suffix,
        adapter_name=f"ft:{base}:{config.api.organization}:{suffix or ''}:{short_id(job_id)}",
        requested=requested,
        metadata=body.metadata,
    )


def _base_root(model: str, base_folder: Path | None) -> str:
    """How adapters name their base: a hub's id, which means the same everywhere, or else the folder."""
    if base_folder is not None and (model == "tiny" or Path(model).expanduser().exists()):
        return str(base_folder)
    return model


def _requested(body: CreateJobRequest, limits: Limits) -> dict[str, Any]:
    """The method and all hyperparameters, wherever they stand in the request, checked; and the seed."""
    method, given = _of_method(body.method)
    parts = {f"method.{method}.hyperparameters": given, "hyperparameters": body.hyperparameters or {}}
    checked = check_hyperparameters(parts, limits, method)
    requested = {"method": method, "n_epochs": "auto", "batch_size": "auto", **checked}
    if "learning_rate" not in requested:
        requested.setdefault("learning_rate_multiplier", "auto")
    if body.seed is not None and requested.get("seed", body.seed) != body.seed:
        raise InvalidInputError(
            "'seed' has different values in the request and in its hyperparameters; give it once.",
            code="invalid_hyperparameters",
            param="seed",
        )
    requested.setdefault("seed", DEFAULT_SEED if body.seed is None else body.seed)
    return requested


def _of_method(method: Method | None) -> tuple[str, Mapping[str, Any]]:
    """The method's name, and the hyperparameters in its own part of the request."""
    if method is None:
        return SUPERVISED, {}
    if method.type == "reinforcement":
        raise InvalidInputError(
            "method.type 'reinforcement' is not supported by this server; 'supervised' and 'dpo' are.",
            code="unsupported_method",
            param="method.type",
        )
    if method.type not in METHODS:
        raise InvalidInputError(
            f"Invalid 'method.type': expected one of {', '.join(METHODS)}, got '{method.type[:50]}'.",
            code="invalid_value",
            param="method.type",
        )
    for name in ("supervised", "dpo", "reinforcement"):
        if name != method.type and getattr(method, name):
            raise InvalidInputError(
                f"'method.{name}' does not belong to method.type '{method.type}'.",
                code="invalid_value",
                param=f"method.{name}",
            )
    settings: MethodSettings | None = getattr(method, method.type)
    return method.type, (settings and settings.hyperparameters) or {}


def _check_model(name: str, config: ServerConfig, store: Store) -> None:
    if name in (config.model.served_model_names or (config.model.model,)):
        return
    is_module = any(name == module for module, _ in config.lora.modules)
    if is_module or store.find_adapter(name) is not None:
        raise InvalidInputError(
            f"'{name}' is a fine-tuned model; only the base model '{config.model.name}' can be fine-tuned for now.",
            code="model_not_available",
            param="model",
        )
    raise unknown_model(name)


def _check_suffix(suffix: str | None) -> str | None:
    if not suffix:
        return None
    if not _SUFFIX.fullmatch(suffix):
        raise InvalidInputError(
            "Invalid 'suffix': expected up to 64 letters, digits, '-', '_' and '.', the first of them a letter or "
            "a digit.",
            code="invalid_suffix",
            param="suffix",
        )
    return suffix


def _check_metadata(metadata: Mapping[str, str] | None) -> None:
    problem = None
    if metadata is not None and len(metadata) > MAX_METADATA:
        problem = f"at most {MAX_METADATA} pairs are allowed, got {len(metadata)}"
    for key, value in (metadata or {}).items():
        if not 0 < len(key) <= MAX_METADATA_KEY:
            problem = f"keys must have 1 to {MAX_METADATA_KEY} characters"
        elif len(value) > MAX_METADATA_VALUE:
            problem = f"the value of '{key}' has more than {MAX_METADATA_VALUE} characters"
    if problem is not None:
        raise InvalidInputError(f"Invalid 'metadata': {problem}.", code="invalid_value", param="metadata")


def _check_needs_no_validation(requested: Mapping[str, Any]) -> None:
    for name in ("early_stopping_patience", "load_best_model_at_end", "eval_steps"):
        if requested.get(name):
            raise InvalidInputError(
                f"'{name}' measures steps on a validation file; add 'validation_file', or leave '{name}' out.",
                code="missing_required_parameter",
                param="validation_file",
            )


def _check_file(file_id: str, param: str, store: Store) -> None:
    try:
        record = store.files.get(file_id)
    except NotFoundError:
        raise missing_file(param, file_id) from None
    if record.purpose != TRAINING_PURPOSE:
        raise InvalidInputError(
            f"Invalid '{param}': file '{file_id}' has purpose '{record.purpose}', but '{TRAINING_PURPOSE}' is needed.",
            code="invalid_file_purpose",
            param=param,
        )
