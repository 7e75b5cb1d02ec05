"""Weighted cross entropy from the last hidden state, in chunks of rows, so that logits take a bounded memory.

Gradients are computed with the losses: the logits, once they are there, need not be made again. ``objective`` says what
losses and gradients a step makes of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from cotenant.finetune.microbatch import MicroBatch
from cotenant.models.decoder import Decoder
from cotenant.models.layer_backward import head_backward
from cotenant.models.products import has_triton

_CHUNK_BYTES = 32 << 20
_HALF_PRECISION_CHUNK_BYTES = 512 << 20


def chunk_bytes(dtype: torch.dtype) -> int:
    """What the logits of one chunk take at most, and their gradient, where it does not replace them, as much again.
    Models in half precision run on GPUs, whose products with the head want many rows."""
    return _CHUNK_BYTES if dtype == torch.float32 else _HALF_PRECISION_CHUNK_BYTES


@dataclass(slots=True)
class LossSums:
    """Sums over target tokens, kept on the device so that adding to them waits for nothing.

    ``weighted_nll``: sum(weight * nll); ``num_correct``: targets that are the most likely token; ``num_targets``.
    """

    weighted_nll: torch.Tensor  # [], float64
    num_correct: torch.Tensor  # [], int64
    num_targets: int = 0

    @staticmethod
    def zero(device: torch.device) -> LossSums:
        return LossSums(
            torch.zeros((), dtype=torch.float64, device=device), torch.zeros((), dtype=torch.int64, device=device)
        )

    @staticmethod
    def of(nll: torch.Tensor, weights: torch.Tensor, correct: torch.Tensor) -> LossSums:
        """Of each target [targets]: its negative log-likelihood, its weight, and whether it is the most likely
        token."""
        return LossSums((nll.double() * weights).sum(), correct.sum(), len(nll))

    def copy(self) -> LossSums:
        return LossSums(self.weighted_nll.clone(), self.num_correct.clone(), self.num_targets)

    def __iadd__(self, other: LossSums) -> LossSums:
        self.weighted_nll += other.weighted_nll
        self.num_correct += other.num_correct
        self.num_targets += other.num_targets
        return self

    def accuracy(self) -> float:
        """Share of the target tokens that were the most likely token."""
        return float(self.num_correct) / max(1, self.num_targets)

    def read(self, *others: torch.Tensor) -> tuple[float, ...]:
        """``weighted_nll``, ``accuracy()``, and the values of ``others`` []. Waits for the device once."""
        tensors = torch.stack([tensor.double() for tensor in (self.weighted_nll, self.num_correct, *others)])
        weighted_nll, num_correct, *values = tensors.tolist()
        return weighted_nll, num_correct / max(1, self.num_targets), *values


@torch.no_grad()
def token_losses(decoder: Decoder, hidden: torch.Tensor, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Each target's negative log-likelihood [targets], float32, and whether it is the most likely token [targets].

    ``hidden``: the last layer's output [tokens, hidden].
    """
    nll, correct = empty_losses(len(micro_batch.rows), hidden.device)
    for part in chunks(decoder, len(nll), torch.float32):
        nll[part], correct[part] = losses(decoder, hidden[micro_batch.rows[part]], micro_batch.targets[part])
    return nll, correct


def empty_losses(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for what ``token_losses`` gives."""
    return torch.empty(count, device=device), torch.empty(count, dtype=torch.bool, device=device)


def chunks(decoder: Decoder, num_targets: int, dtype: torch.dtype) -> list[slice]:
    """``dtype``: of the logits that are kept."""
    size = max(1, chunk_bytes(decoder.dtype) // (dtype.itemsize * decoder.spec.vocab_size))
    return [slice(start, min(start + size, num_targets)) for start in range(0, num_targets, size)]


def losses(decoder: Decoder, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of these rows [rows, hidden]: each one's loss and whether its target is the most likely token [rows]."""
    logits = decoder.logits(inputs)  # [rows, vocabulary], float32
    nll, correct = F.cross_entropy(logits, targets, reduction="none"), logits.argmax(dim=-1) == targets
    return nll + _overflow(inputs), correct


def _overflow(inputs: torch.Tensor) -> torch.Tensor:
    """0 for each of the rows [rows, hidden], or not a number where its squares overflow: its norm is 0 then, all tokens
    are as likely, and nothing would be learned from it any more."""
    return inputs.float().square().mean(dim=-1).mul_(0.0)


def losses_and_gradient(
    decoder: Decoder, inputs: torch.Tensor, targets: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of these rows: each one's loss and whether its target is the most likely token [rows], and the gradient of
    sum(``scales`` * losses) at ``inputs`` [rows, hidden]. The loss of a row whose squares overflow is not a number."""
    logits = decoder.raw_logits(inputs)  # [rows, vocabulary]
    overflow = _overflow(inputs)
    if logits.is_cuda and has_triton():
        from cotenant.models.kernels.cross_entropy import cross_entropy_in_place

        nll, correct = cross_entropy_in_place(logits, targets, scales)
        return nll + overflow, correct, head_backward(decoder, inputs, logits)
    logits = logits.float()
    nll, correct = F.cross_entropy(logits, targets, reduction="none"), logits.argmax(dim=-1) == targets
    gradient = torch.softmax(logits, dim=-1).mul_(scales.unsqueeze(1))
    gradient.scatter_add_(1, targets.unsqueeze(1), -scales.unsqueeze(1))
    return nll + overflow, correct, head_backward(decoder, inputs, gradient.to(inputs.dtype))
