"""Jobs that run to their end, with which others are compared."""

from __future__ import annotations

from pathlib import Path

from cotenant.finetune.job import TrainingJob
from cotenant.models.decoder import Decoder
from finetune import support

VALIDATION = support.random_examples(10, seed=5)


def undisturbed_job(decoder: Decoder, folder: Path, **changes: object) -> TrainingJob:
    job = support.make_job(decoder, support.make_spec(folder, validation=VALIDATION, **changes))
    support.run_to_end(job)
    job.close()
    return job
