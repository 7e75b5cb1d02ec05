"""Weighted cross entropy from the last hidden state, in chunks of rows, so that logits take a bounded memory.

Gradients are computed with the losses: the logits, once they are there, need not be made again.
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

    def add(self, nll: torch.Tensor, weights: torch.Tensor, correct: torch.Tensor) -> None:
        self.weighted_nll += (nll.detach().double() * weights).sum()
        self.num_correct += correct.sum()
        self.num_targets += len(nll)

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
def loss_and_gradient(
    decoder: Decoder,
    hidden: torch.Tensor,
    micro_batch: MicroBatch,
    total_weight: float,
    gradient: torch.Tensor,
) -> LossSums:
    """The micro-batch's loss sums; ``gradient`` [tokens, hidden], zeros before, becomes that of
    sum(weight * nll) / ``total_weight`` at ``hidden``.

    ``hidden``: the last layer's output [tokens, hidden], outside any graph. ``total_weight`` is that of the whole
    optimizer step, so gradients of its micro-batches simply add up. A step without weight has gradient 0.
    """
    sums = LossSums.zero(hidden.device)
    scales = micro_batch.weights / total_weight if total_weight > 0 else micro_batch.weights
    for start, stop in _chunks(decoder, micro_batch, decoder.dtype):
        rows = micro_batch.rows[start:stop]
        nll, correct, gradient[rows] = losses_and_gradient(
            decoder, hidden[rows], micro_batch.targets[start:stop], scales[start:stop]
        )
        sums.add(nll, micro_batch.weights[start:stop], correct)
    return sums


@torch.no_grad()
def evaluation_loss(decoder: Decoder, hidden: torch.Tensor, micro_batch: MicroBatch) -> LossSums:
    """The micro-batch's loss sums, without gradients. ``hidden``: the last layer's output [tokens, hidden]."""
    sums = LossSums.zero(hidden.device)
    for start, stop in _chunks(decoder, micro_batch, torch.float32):
        nll, correct = _nll(decoder, hidden[micro_batch.rows[start:stop]], micro_batch.targets[start:stop])
        sums.add(nll, micro_batch.weights[start:stop], correct)
    return sums


@torch.no_grad()
def token_losses(decoder: Decoder, hidden: torch.Tensor, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Each target's negative log-likelihood [targets], float32, and whether it is the most likely token [targets].

    ``hidden``: the last layer's output [tokens, hidden].
    """
    parts = [
        _nll(decoder, hidden[micro_batch.rows[start:stop]], micro_batch.targets[start:stop])
        for start, stop in _chunks(decoder, micro_batch, torch.float32)
    ]
    return _joined(hidden, [nll for nll, _ in parts]), _joined(hidden, [correct for _, correct in parts]).bool()


@torch.no_grad()
def token_losses_and_gradients(
    decoder: Decoder, hidden: torch.Tensor, micro_batch: MicroBatch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``token_losses``, and the gradient [targets, hidden] of each target's loss at its own row of ``hidden``.

    A loss that depends on all targets has the gradient of this times its own slope in each target's loss.
    """
    parts = [
        losses_and_gradient(
            decoder,
            hidden[micro_batch.rows[start:stop]],
            micro_batch.targets[start:stop],
            torch.ones(stop - start, device=hidden.device),
        )
        for start, stop in _chunks(decoder, micro_batch, decoder.dtype)
    ]
    nlls, corrects = (_joined(hidden, [part[index] for part in parts]) for index in (0, 1))
    gradients = torch.cat([gradient for _, _, gradient in parts]) if parts else hidden[:0]
    return nlls, corrects.bool(), gradients


def _joined(like: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, device=like.device)


def _chunks(decoder: Decoder, micro_batch: MicroBatch, dtype: torch.dtype) -> list[tuple[int, int]]:
    """``dtype``: of the logits that are kept."""
    size = max(1, chunk_bytes(decoder.dtype) // (dtype.itemsize * decoder.spec.vocab_size))
    num_targets = len(micro_batch.rows)
    return [(start, min(start + size, num_targets)) for start in range(0, num_targets, size)]


def _nll(decoder: Decoder, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
