"""Tokenised training examples, read back from the file that ``text.examples`` wrote.

The file is safetensors: ``token_ids`` int32 [total], ``weights`` float32 [total] (the loss weight of predicting that
token; the first token of an example is never predicted) and ``offsets`` int64 [examples + 1].
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from cotenant.core.errors import CotenantError, InvalidInputError
from cotenant.models.tensors_in_memory import read_tensors

_DTYPES = {"token_ids": torch.int32, "weights": torch.float32, "offsets": torch.int64}


@dataclass(frozen=True, slots=True)
class Example:
    """One example, cut to the job's ``max_length``. The weight of its first token is 0."""

    token_ids: torch.Tensor  # [length], int32
    weights: torch.Tensor  # [length], float32


class Dataset:
    """Examples cut to ``max_length`` tokens. Per example, as Python numbers, so that order and micro-batches are worked
    out without touching tensors: ``lengths``, ``loss_weights`` (sums of the weights), and ``num_targets`` (tokens whose
    weight is not 0)."""

    def __init__(self, token_ids: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor, max_length: int) -> None:
        starts, lengths = offsets[:-1], offsets.diff()
        example = torch.repeat_interleave(torch.arange(len(starts)), lengths)  # [total], whose token it is
        position = torch.arange(len(token_ids)) - starts[example]  # [total], within its example
        self._token_ids = token_ids  # [total], int32
        self._weights = weights.masked_fill((position == 0) | (position >= max_length), 0.0)  # [total], float32
        sums = torch.zeros(len(starts), dtype=torch.float64).index_add_(0, example, self._weights.double())
        self._starts: list[int] = starts.tolist()
        self.lengths: tuple[int, ...] = tuple(lengths.clamp(max=max_length).tolist())
        self.loss_weights: tuple[float, ...] = tuple(sums.tolist())
        self.num_targets: tuple[int, ...] = tuple(
            torch.bincount(example[self._weights > 0], minlength=len(starts)).tolist()
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        start = self._starts[index]
        stop = start + self.lengths[index]
        return Example(self._token_ids[start:stop], self._weights[start:stop])

    @property
    def trainable(self) -> bool:
        """Whether any token of any example counts in the loss."""
        return any(weight > 0 for weight in self.loss_weights)

    def digest(self) -> str:
        """A fingerprint of what is trained on (SHA-256)."""
        digest = hashlib.sha256(repr(self.lengths).encode())
        digest.update(self._token_ids.numpy().data)
        digest.update(self._weights.numpy().data)
        return digest.hexdigest()


def load_dataset(path: Path, max_length: int, vocab_size: int) -> Dataset:
    """Read and check a file of tokenised examples.

    Raises:
        InvalidInputError: the file is missing, or its content makes no sense for this model.
        CotenantError: the disk does not give it.
    """
    if max_length < 2:
        raise InvalidInputError(f"max_length must be at least 2, not {max_length}", param="max_length")
    tensors = _read(path)
    token_ids, weights, offsets = tensors["token_ids"], tensors["weights"], tensors["offsets"]
    _check(path, token_ids, weights, offsets, vocab_size)
    return Dataset(token_ids, weights, offsets, max_length)


def _bad(path: Path, problem: str) -> InvalidInputError:
    return InvalidInputError(
        f"The tokenised examples in {path} cannot be used: {problem}", code="invalid_training_file"
    )


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        tensors = read_tensors(path)
    except FileNotFoundError as error:
        raise _bad(path, "the file does not exist") from error
    except OSError as error:
        message = f"The tokenised examples in {path} cannot be read: {error}."
        raise CotenantError(message, code="io_error") from error
    except ValueError as error:
        raise _bad(path, f"the file cannot be read ({error})") from error
    for name, dtype in _DTYPES.items():
        if name not in tensors:
            raise _bad(path, f"tensor '{name}' is missing")
        if tensors[name].dtype != dtype or tensors[name].dim() != 1:
            raise _bad(path, f"tensor '{name}' must be one-dimensional and {dtype}")
    return tensors


def _check(path: Path, token_ids: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor, vocab_size: int) -> None:
    if len(token_ids) != len(weights):
        raise _bad(path, f"{len(token_ids)} tokens but {len(weights)} weights")
    if len(offsets) == 0 or int(offsets[0]) != 0 or int(offsets[-1]) != len(token_ids):
        raise _bad(path, "the offsets do not cover the tokens")
    empty = (offsets.diff() <= 0).nonzero()
    if len(empty):
        raise _bad(path, f"example {int(empty[0]) + 1} has no tokens")
    if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        raise _bad(path, f"a token id lies outside the model's vocabulary of {vocab_size}")
    if not bool(torch.isfinite(weights).all()) or bool((weights < 0).any()):
        raise _bad(path, "a loss weight is negative or not finite")
