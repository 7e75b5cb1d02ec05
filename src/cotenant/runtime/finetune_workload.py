"""What `cotenant bench finetune` and `cotenant bench colocate` train."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from cotenant.core.job import Hyperparameters
from cotenant.finetune.dataset import Dataset
from cotenant.models.spec import ModelSpec

_STEPS_PER_EPOCH = 64


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained: rows of ``seq_len`` random tokens, ``tokens_per_step`` (a multiple of ``seq_len``) in an
    optimizer step. A row is one sequence, or with ``min_len`` several that are packed: their lengths are random, from
    that to ``seq_len``, and rows are as full as they get. ``tasklet_tokens``: of a micro-batch at most; 0: as the
    server chooses. The adapter has rank ``r`` on all linear modules. ``activation_bytes``: of the device's memory, what
    activations may take; None: what they need. ``dropout``: the adapter's."""

    seq_len: int
    tokens_per_step: int
    tasklet_tokens: int
    r: int
    gradient_checkpointing: bool
    min_len: int | None = None
    activation_bytes: int | None = None
    dropout: float = 0.0

    def hyperparameters(self) -> Hyperparameters:
        return Hyperparameters(
            n_epochs=1_000_000,
            batch_size=self.tokens_per_step // self.seq_len,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            max_length=self.seq_len,
            packing=True,
            gradient_checkpointing=self.gradient_checkpointing,
            r=self.r,
            lora_alpha=2.0 * self.r,
            lora_dropout=self.dropout,
        )


def flop_per_token(spec: ModelSpec, *, only_multiplied: bool = False) -> int:
    """Arithmetic of training a frozen base on one token, as it is usually counted: 4 for each parameter, 2 in the
    forward pass and 2 for the gradient of the input.

    Parameters are those of the linear modules, the head and the embedding (32.1 GFLOP for Llama-3.1-8B), although
    nothing is multiplied by an embedding: ``only_multiplied`` leaves it out (30.0). Attention, the adapter and what
    is recomputed are never counted.
    """
    embedding = spec.vocab_size * spec.hidden_size
    has_own_embedding = not spec.tie_word_embeddings and not only_multiplied
    return 4 * (spec.layer_parameters + (2 if has_own_embedding else 1) * embedding)


def random_dataset(workload: Workload, vocab_size: int) -> Dataset:
    """Sequences of random tokens; all but the first of each count in the loss."""
    return Dataset(*_random_tokens(workload, vocab_size, _STEPS_PER_EPOCH), workload.seq_len)


def write_random_dataset(path: Path, workload: Workload, vocab_size: int, steps_per_epoch: int) -> None:
    """The same as a file of tokenised examples, with so many steps in an epoch."""
    token_ids, weights, offsets = _random_tokens(workload, vocab_size, steps_per_epoch)
    save_file({"token_ids": token_ids, "weights": weights, "offsets": offsets}, path)


def _random_tokens(
    workload: Workload, vocab_size: int, steps_per_epoch: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, weights, and where examples begin, as ``Dataset`` takes them."""
    num_tokens = steps_per_epoch * workload.tokens_per_step
    generator = torch.Generator().manual_seed(0)
    least = workload.seq_len if workload.min_len is None else workload.min_len
    most_sequences = num_tokens // least
    lengths = torch.randint(least, workload.seq_len + 1, (most_sequences,), generator=generator)
    ends = lengths.cumsum(0)
    ends = ends[ends <= num_tokens]
    num_tokens = int(ends[-1])
    token_ids = torch.randint(0, vocab_size, (num_tokens,), generator=generator, dtype=torch.int32)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
    return token_ids, torch.ones(num_tokens), offsets
