"""Checkpoints: a served adapter and everything that training needs to go on from it, bit for bit.

``checkpoints/step-00000088/`` holds the adapter's and tokenizer's files, ``trainer_state.safetensors`` (float32 master
weights and optimizer moments) and ``trainer_state.json`` with the digests of both tensor files. A folder appears in one
rename; one that fails its digests is passed over.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import safetensors.torch
import torch

from cotenant.core.job import StepMetrics
from cotenant.core.job_layout import STATE_FILE, TENSOR_FILE, checkpoint_folder, step_of
from cotenant.durable import atomic_folder, remove_folder
from cotenant.finetune.export import write_adapter_files
from cotenant.models.lora import LoraAdapter
from cotenant.models.safetensors_file import read_header, read_whole
from cotenant.models.tensors_in_memory import tensors_in

logger = logging.getLogger(__name__)

ADAPTER_FILE = "adapter_model.safetensors"
# It is not there, or something else is in its place: that stays so, other errors may pass.
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# The newest, and one to fall back on if that is damaged.
_NUM_RESUMABLE = 2


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """``trainer_state.json``. Data order, schedule and dropout follow from ``step`` and the job's settings.

    ``epoch``: how many epochs ``step`` steps are. ``announced``: a checkpoint to be served (end of an epoch,
    ``save_steps``), not one made for a pause or because it is the best so far. ``needs_evaluation``: the step is taken,
    but the validation that belongs to it is not over, so ``metrics`` is without it and not in ``metrics.jsonl`` yet.
    ``fingerprint``: of the job's settings and data.
    """

    step: int
    epoch: float
    trained_tokens: int
    announced: bool
    metrics: StepMetrics
    needs_evaluation: bool
    fingerprint: str
    digests: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copies of the training state, on the CPU, where later steps leave them alone. ``tensors`` go into
    ``TENSOR_FILE``."""

    adapter: LoraAdapter
    tensors: dict[str, torch.Tensor]


class CheckpointError(Exception):
    """A checkpoint folder that cannot be used, and why."""


class CheckpointStore:
    """The checkpoints of one job, in ``folder``."""

    def __init__(
        self, folder: Path, base_model: str, tokenizer_folder: Path | None, total_limit: int | None = None
    ) -> None:
        """``total_limit``: announced checkpoints that are kept, the best one counted among them; None or 0: all."""
        self._folder = folder
        self._total_limit = total_limit
        self._base_model = base_model
        self._tokenizer_folder = tokenizer_folder

    def path(self, step: int) -> Path:
        return self._folder / checkpoint_folder(step)

    def write(self, state: TrainerState, snapshot: Snapshot, best_step: int | None) -> Path:
        """Write a checkpoint atomically. Then remove what it makes superfluous, and with an announced one,
        ``keep_newest``."""
        target = self.path(state.step)
        with atomic_folder(target) as folder:
            write_adapter_files(snapshot.adapter, folder, self._base_model, self._tokenizer_folder)
            safetensors.torch.save_file(snapshot.tensors, folder / TENSOR_FILE)
            digests = {name: _digest(folder / name) for name in (ADAPTER_FILE, TENSOR_FILE)}
            with_digests = msgspec.structs.replace(state, digests=digests)
            (folder / STATE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(with_digests)))
        self._remove_superfluous(state.step, best_step)
        if state.announced:
            self.keep_newest(state.step, best_step)
        return target

    def tidy(self, step: int, best_step: int | None) -> None:
        """Remove what a kill behind the last ``write`` has left, where training goes on from ``step``'s checkpoint: it
        may be long until the next one is written, or there may be none."""
        self._remove_superfluous(step, best_step)
        self.keep_newest(step, best_step)

    def _remove_superfluous(self, step: int, best_step: int | None) -> None:
        """Remove the checkpoints before ``step``'s that are neither announced nor ``best_step``'s, and from all but the
        newest ``_NUM_RESUMABLE`` what only training needs: they stay to be served."""
        newest = self.path(step)
        kept_paths = {newest} if best_step is None else {newest, self.path(best_step)}
        kept = 0
        # Those of later steps are damaged, or training would have gone on from there: they do not count.
        for path in [path for path in self._newest_first() if path.name <= newest.name]:
            if path not in kept_paths and not _announced(path):
                remove_folder(path)  # not piece by piece: what is left of one would be listed when the job ends
                continue
            kept += 1
            if kept > _NUM_RESUMABLE:
                (path / TENSOR_FILE).unlink(missing_ok=True)

    def keep_newest(self, step: int, best_step: int | None) -> None:
        """Remove what is over the limit of the checkpoints up to ``step``, oldest first, as transformers does: never
        the newest announced one, nor ``best_step``'s. One that was made for a pause does not count."""
        if not self._total_limit:
            return
        announced = [state.step for state, _ in self.announced() if state.step <= step]
        kept = {*announced[-1:], *([] if best_step is None else [best_step])}
        others = [step for step in announced if step not in kept]
        num_others = max(0, self._total_limit - len(kept))
        for step in others[: max(0, len(others) - num_others)]:
            remove_folder(self.path(step))

    def newest(self) -> tuple[TrainerState, dict[str, torch.Tensor]] | None:
        """The newest checkpoint that is whole, with the tensors of ``TENSOR_FILE``; None if there is none.

        Raises OSError for one that cannot be read now: whoever passed it over would lose what it holds.
        """
        for path in self._newest_first():
            try:
                state = read_state(path)
                with (path / TENSOR_FILE).open("rb") as file:
                    header = read_header(file)
                    content = read_whole(file, header)
                found = {ADAPTER_FILE: _digest(path / ADAPTER_FILE), TENSOR_FILE: hashlib.sha256(content).hexdigest()}
                for name, digest in state.digests.items():
                    if found[name] != digest:
                        raise CheckpointError(f"{name} is damaged")
                return state, tensors_in(content, header)
            except (CheckpointError, *_ABSENT, ValueError) as error:
                logger.warning("Checkpoint %s cannot be used (%s); trying the one before it", path, error)
        return None

    def adapter_folder(self, step: int) -> Path:
        """Where the adapter of a checkpoint lies.

        Raises:
            CheckpointError: there is no such checkpoint, or its adapter is damaged.
        """
        path = self.path(step)
        try:
            state = read_state(path)
            if _digest(path / ADAPTER_FILE) != state.digests[ADAPTER_FILE]:
                raise CheckpointError(f"{ADAPTER_FILE} of {path} is damaged")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        return path

    def announced(self) -> list[tuple[TrainerState, Path]]:
        """The checkpoints to be served, oldest first, as far as their files are there."""
        found = []
        for path in reversed(list(self._newest_first())):
            try:
                state = read_state(path)
            except (CheckpointError, OSError):
                continue  # ``newest`` has told of it or will
            if state.announced and (path / ADAPTER_FILE).is_file():
                found.append((state, path))
        return found

    def _newest_first(self) -> Iterator[Path]:
        if not self._folder.is_dir():
            return
        names = sorted((path.name for path in self._folder.iterdir() if step_of(path.name) is not None), reverse=True)
        for name in names:
            yield self._folder / name


def read_state(folder: Path) -> TrainerState:
    """The ``trainer_state.json`` of a checkpoint folder.

    Raises:
        CheckpointError: it is missing or is not one of ours.
        OSError: it cannot be read.
    """
    try:
        state = msgspec.json.decode((folder / STATE_FILE).read_bytes(), type=TrainerState)
    except (*_ABSENT, msgspec.DecodeError) as error:
        raise CheckpointError(f"{STATE_FILE} cannot be read: {error}") from error
    if set(state.digests) != {ADAPTER_FILE, TENSOR_FILE}:
        raise CheckpointError(f"{STATE_FILE} is incomplete")
    return state


def _announced(folder: Path) -> bool:
    try:
        return read_state(folder).announced
    except (CheckpointError, OSError):
        return True  # unreadable: not ours to delete


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
