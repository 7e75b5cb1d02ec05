"""How a job's folder is laid out, which the worker writes and the API process reads."""

from __future__ import annotations

import re

CHECKPOINTS_FOLDER = "checkpoints"
STATE_FILE = "trainer_state.json"
TENSOR_FILE = "trainer_state.safetensors"
_CHECKPOINT_FOLDER = re.compile(r"step-(\d{8})")


def checkpoint_folder(step: int) -> str:
    """The name of a step's folder in ``CHECKPOINTS_FOLDER``."""
    return f"step-{step:08d}"


def step_of(folder: str) -> int | None:
    """Of which step a folder of this name is; None where it is no checkpoint's."""
    match = _CHECKPOINT_FOLDER.fullmatch(folder)
    return None if match is None else int(match[1])
