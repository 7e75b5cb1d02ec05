"""What lies in a job's folder: its tokenised examples, and what the worker has left, read without its help."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cotenant.core.job import StepMetrics
from cotenant.core.job_layout import CHECKPOINTS_FOLDER, STATE_FILE, TENSOR_FILE, step_of
from cotenant.store.errors import store_error

TRAINING_EXAMPLES = "train.safetensors"
VALIDATION_EXAMPLES = "valid.safetensors"


class _Recorded(msgspec.Struct):
    """Of ``trainer_state.json``."""

    metrics: StepMetrics | None = None


def checkpoints_in(job_folder: Path) -> list[tuple[int, Path]]:
    """The steps with a whole checkpoint, oldest first, and their folders. Raises StoreError."""
    found = []
    folder = job_folder / CHECKPOINTS_FOLDER
    try:
        paths = list(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise store_error(error) from error
    for path in paths:
        step = step_of(path.name)
        if step is not None and is_whole(path):
            found.append((step, path))
    return sorted(found)


def resumable_step(job_folder: Path) -> int:
    """The step from which the job would go on; 0: the beginning. Older checkpoints are left without the trainer's
    state. Raises StoreError."""
    steps = [
        step
        for step, path in checkpoints_in(job_folder)
        if all((path / name).is_file() for name in (STATE_FILE, TENSOR_FILE))
    ]
    return max(steps, default=0)


def metrics_in(checkpoint: Path) -> StepMetrics | None:
    """Those of a checkpoint's step, as its folder has them."""
    try:
        return msgspec.json.decode((checkpoint / STATE_FILE).read_bytes(), type=_Recorded).metrics
    except (OSError, msgspec.DecodeError):
        return None


def is_whole(checkpoint: Path) -> bool:
    """Adapter folders appear and go in one rename, so where this file is the others are too."""
    return (checkpoint / "adapter_config.json").is_file()
