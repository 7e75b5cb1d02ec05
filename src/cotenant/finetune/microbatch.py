"""Micro-batches: whole examples, one after the other without padding, that go through the decoder together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cotenant.device.upload import upload
from cotenant.finetune.dataset import Dataset
from cotenant.finetune.order import pack
from cotenant.models.batch import AdapterSpan, Batch, TrainingSegment
from cotenant.models.lora import LoraAdapter


@dataclass(frozen=True, slots=True)
class MicroBatchShape:
    """What is known of a micro-batch before its tensors are built. ``num_targets``: tokens that count in the loss."""

    examples: tuple[int, ...]
    num_tokens: int
    num_targets: int
    max_length: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The tensors of one micro-batch. ``rows[i]`` is the flat position whose output predicts ``targets[i]``; only
    targets whose weight is not 0 are listed."""

    examples: tuple[int, ...]
    batch: Batch
    segment: TrainingSegment
    rows: torch.Tensor  # [targets], int64
    targets: torch.Tensor  # [targets], int64
    weights: torch.Tensor  # [targets], float32


def split(dataset: Dataset, examples: Sequence[int], max_tokens: int) -> tuple[MicroBatchShape, ...]:
    """Divide a step's examples into micro-batches of at most ``max_tokens`` tokens; a longer example is alone in one.

    Depends on the lengths and ``max_tokens`` only, never on load, so a step adds up to the same bits every time; only
    memory that is wanted elsewhere changes ``max_tokens``.
    """
    lengths = [dataset.lengths[example] for example in examples]
    return tuple(
        MicroBatchShape(
            examples=tuple(examples[item] for item in items),
            num_tokens=sum(lengths[item] for item in items),
            num_targets=sum(dataset.num_targets[examples[item]] for item in items),
            max_length=max(lengths[item] for item in items),
        )
        for items in pack(lengths, max_tokens)
    )


Split = Callable[[Dataset, Sequence[int], int], tuple[MicroBatchShape, ...]]
"""As ``split``: a job's own way to divide examples."""


def fits(shape: MicroBatchShape, dataset: Dataset, max_tokens: int, divide: Split) -> bool:
    """Whether a micro-batch has at most so many tokens, or cannot be cut."""
    return shape.num_tokens <= max_tokens or len(divide(dataset, shape.examples, max_tokens)) == 1


def build(dataset: Dataset, shape: MicroBatchShape, adapter: LoraAdapter | None, device: torch.device) -> MicroBatch:
    """Put a micro-batch's tensors on the device. ``adapter`` None: the base alone computes it."""
    parts = [dataset[example] for example in shape.examples]
    lengths = tuple(len(part.token_ids) for part in parts)
    token_ids = torch.cat([part.token_ids for part in parts]).long()  # [tokens]
    weights = torch.cat([part.weights for part in parts])  # [tokens]
    # An example's first token has weight 0, so the row before a target always belongs to the same example.
    targets_at = weights.nonzero().squeeze(1)  # [targets]
    positions = torch.cat([torch.arange(length) for length in lengths])
    numbers = [token_ids, positions, targets_at - 1, token_ids[targets_at]]
    on_device = upload(torch.cat(numbers), device).split([len(part) for part in numbers])
    segment = TrainingSegment(lengths)
    batch = Batch(
        token_ids=on_device[0],
        positions=on_device[1],
        segments=(segment,),
        spans=() if adapter is None else (AdapterSpan(0, shape.num_tokens, adapter),),
    )
    return MicroBatch(
        examples=shape.examples,
        batch=batch,
        segment=segment,
        rows=on_device[2],
        targets=on_device[3],
        weights=upload(weights[targets_at], device),
    )
