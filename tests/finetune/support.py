"""Small real models, data and jobs for the tests of ``finetune``."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import safetensors.torch
import torch

from cotenant.config import ModelConfig
from cotenant.core.job import Hyperparameters, JobSpec
from cotenant.finetune.job import TrainingJob
from cotenant.models.decoder import Decoder
from cotenant.models.loading import load_decoder
from cotenant.models.registry import resolve_model
from cotenant.wire.messages import FromWorker

VOCAB_SIZE = 211
TASKLET_TOKENS = 48

HYPER = Hyperparameters(
    n_epochs=2,
    batch_size=4,
    learning_rate=5e-3,
    lr_scheduler_type="cosine",
    warmup_steps=3,
    weight_decay=0.01,
    max_grad_norm=1.0,
    max_length=40,
    seed=7,
    r=4,
    lora_alpha=8.0,
)

Examples = Sequence[tuple[list[int], list[float]]]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(resolve_model(ModelConfig(str(folder))), torch.device("cpu"), dtype, seed=0)


def random_examples(
    count: int, seed: int = 0, shortest: int = 5, longest: int = 38
) -> list[tuple[list[int], list[float]]]:
    """Conversations of random tokens: a prompt without weight, then spans with and without weight in turn."""
    generator = random.Random(seed)
    examples = []
    for _ in range(count):
        length = generator.randint(shortest, longest)
        prompt = generator.randint(1, length - 2)
        weights = [0.0] * prompt + [1.0] * (length - prompt)
        if length - prompt > 6:
            weights[prompt + 2 : prompt + 4] = [0.0, 0.0]
        examples.append(([generator.randrange(3, VOCAB_SIZE) for _ in range(length)], weights))
    return examples


def write_examples(path: Path, examples: Examples) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    offsets = [0]
    for token_ids, _ in examples:
        offsets.append(offsets[-1] + len(token_ids))
    safetensors.torch.save_file(
        {
            "token_ids": torch.tensor([token for ids, _ in examples for token in ids], dtype=torch.int32),
            "weights": torch.tensor([weight for _, weights in examples for weight in weights], dtype=torch.float32),
            "offsets": torch.tensor(offsets, dtype=torch.int64),
        },
        path,
    )
    return path


def make_spec(
    folder: Path,
    examples: Examples | None = None,
    validation: Examples | None = None,
    *,
    hyper: Hyperparameters = HYPER,
    recorded_step: int = 0,
    **changes: object,
) -> JobSpec:
    """A job in ``folder``; writes its data if it isn't there. ``changes`` are to the hyperparameters."""
    if not (folder / "train.safetensors").exists():
        write_examples(folder / "train.safetensors", random_examples(18) if examples is None else examples)
        if validation is not None:
            write_examples(folder / "valid.safetensors", validation)
    valid = folder / "valid.safetensors"
    return JobSpec(
        job_id="ftjob-1",
        base_model="base",
        folder=str(folder),
        dataset_path=str(folder / "train.safetensors"),
        validation_path=str(valid) if valid.exists() else None,
        adapter_name="ft:base:test",
        hyperparameters=replace(hyper, **changes),  # type: ignore[arg-type]
        recorded_step=recorded_step,
    )


def make_job(decoder: Decoder, spec: JobSpec, **options: object) -> TrainingJob:
    return TrainingJob(decoder, spec, TASKLET_TOKENS, None, **options)  # type: ignore[arg-type]


def run(job: TrainingJob, num_tasklets: int) -> None:
    for _ in range(num_tasklets):
        job.run_tasklet()


def wait_for_copy(job: TrainingJob) -> None:
    """Until the next tasklet changes nothing that is being copied: so long it is not upcoming."""
    while job.waits_for_copy:
        time.sleep(1e-4)


def run_step(job: TrainingJob) -> None:
    """Up to the end of the current step, its evaluation included; it waits for the disk if it has to."""
    if not job.upcoming():
        job.wait_for_writes()
    run(job, sum(cycle.num_tasklets for cycle in job.upcoming()))


def run_to_end(job: TrainingJob) -> list[FromWorker]:
    updates: list[FromWorker] = []
    while not job.done:
        if job.upcoming():
            run_step(job)
        else:
            job.wait_for_writes()
        updates += job.take_updates()
    return updates


def adapter_bytes(folder: Path) -> bytes:
    """The finished adapter of the job in ``folder``."""
    return (folder / "adapter" / "adapter_model.safetensors").read_bytes()
