"""The texts of a job's events, in the words that OpenAI's users know."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cotenant.core.job import StepMetrics
from cotenant.store import JobRecord, NewEvent, Pending

_LABELS = (
    ("train_loss", "training loss"),
    ("valid_loss", "validation loss"),
    ("full_valid_loss", "full validation loss"),
)


def figures(metrics: StepMetrics) -> dict[str, Any]:
    """A step's figures as clients see them. Those of preferences have TRL's names, validation's with a prefix:
    ``rewards/margins``, ``full_valid_rewards/margins``."""
    values = {name: value for name, value in asdict(metrics).items() if value is not None}
    for prefix in ("", "valid_", "full_valid_"):
        preference = values.pop(f"{prefix}preference", {})
        for name, value in preference.items():
            key = name.replace("_", "/") if name.startswith("logps_") else f"rewards/{name}"
            values[prefix + key] = value
    return values


def created(job_id: str, training_file: str, validation_file: str | None) -> list[NewEvent]:
    files = f"Validating training file: {training_file}"
    if validation_file is not None:
        files += f" and validation file: {validation_file}"
    return [NewEvent(f"Created fine-tuning job: {job_id}"), NewEvent(files)]


def validated() -> NewEvent:
    return NewEvent("Files validated, moving job to queued state")


def cut(file: str, max_tokens: int, max_length: int) -> NewEvent:
    return NewEvent(
        f"The {file} has examples of up to {max_tokens} tokens; what lies beyond max_length={max_length} is cut off",
        level="warn",
    )


def batch_is_everything(batch_size: int, num_examples: int) -> NewEvent:
    return NewEvent(
        f"batch_size is {batch_size}, but the training file has {num_examples} examples: each step takes all of them",
        level="warn",
    )


def of_another_base(job: JobRecord) -> NewEvent:
    return NewEvent(
        f"The job belongs to another base model than the one that is served: '{job.model}' ({job.base_root}, "
        f"fingerprint {job.base_fingerprint}). Serve that model on this data folder to go on",
        level="warn",
    )


def nothing_trains(policy: str) -> NewEvent:
    return NewEvent(
        f"This server's policy is {policy}: nothing trains until it is started with another --policy", level="warn"
    )


def rank_is_too_high(rank: int, max_lora_rank: int) -> NewEvent:
    return NewEvent(
        f"The adapter's rank is {rank}, and this server serves none of more than {max_lora_rank}. Start it with "
        f"--max-lora-rank {rank} to go on, or cancel the job and create it again with a smaller r or rank_pattern",
        level="warn",
    )


def started() -> NewEvent:
    return NewEvent("Fine-tuning job started")


def warning(message: str) -> NewEvent:
    return NewEvent(message, level="warn")


def goes_on(step: int) -> NewEvent:
    return NewEvent(f"Fine-tuning job goes on from step {step}")


def step(metrics: StepMetrics, total_steps: int | None) -> NewEvent:
    """A step's figures; those that were not measured are left out."""
    data = figures(metrics)
    data["total_steps"] = total_steps
    losses = ", ".join(f"{label}={data[name]:.4f}" for name, label in _LABELS if name in data)
    position = f"{metrics.step}/{total_steps}" if total_steps else f"{metrics.step}"
    return NewEvent(f"Step {position}: {losses}", type="metrics", data=data, step=metrics.step)


def checkpoint(step_number: int) -> NewEvent:
    return NewEvent(f"Checkpoint created at step {step_number}")


def checkpoint_withdrawn(step_number: int) -> NewEvent:
    return NewEvent(
        f"The checkpoint of step {step_number} is not served any more: with its weights the loss is not finite",
        level="warn",
    )


def checkpoint_deleted(step_number: int) -> NewEvent:
    return NewEvent(f"The checkpoint of step {step_number} was deleted")


def model_deleted(model: str) -> NewEvent:
    return NewEvent(f"The model {model} was deleted")


def requested(goal: Pending) -> NewEvent:
    """Of a stop that takes longer than whoever asked for it waits."""
    what = "Cancellation" if goal is Pending.CANCEL else "Pause"
    return NewEvent(f"{what} requested; it takes effect when the worker confirms it, which may be writing to disk")


def paused() -> NewEvent:
    return NewEvent("Fine-tuning job paused")


def resumed() -> NewEvent:
    return NewEvent("Fine-tuning job resumed")


def cancelled() -> NewEvent:
    return NewEvent("Fine-tuning job cancelled")


def stopped_early(step: int, total_steps: int) -> NewEvent:
    return NewEvent(f"Stopped early after step {step} of {total_steps}: the validation file shows no more progress")


def succeeded(model: str, best_step: int | None) -> list[NewEvent]:
    source = "" if best_step is None else f", with the adapter of step {best_step}, the best on the validation file"
    return [
        NewEvent(f"New fine-tuned model created: {model}{source}"),
        NewEvent("The job has successfully completed"),
    ]


def no_result_file(reason: str) -> NewEvent:
    return NewEvent(f"The file with the job's metrics could not be written: {reason}", level="warn")
