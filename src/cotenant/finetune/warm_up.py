"""What torch loads and makes ready at a first use of it, before anybody waits for a job's first steps."""

from __future__ import annotations

import logging

import torch

from cotenant.core.job import Hyperparameters
from cotenant.device.transfer import to_host
from cotenant.finetune.optimizer import Optimizer
from cotenant.models import flash_attention
from cotenant.models.batch import TrainingSegment
from cotenant.models.decoder import Decoder
from cotenant.models.flash_attention import FlashAttention, Sequences

logger = logging.getLogger(__name__)

_ROWS = 128


def warm_up(decoder: Decoder) -> None:
    """Run what takes jobs longest at its first run, on next to nothing: a backward pass, an optimizer step and, where
    layers are captured, attention. It may run on any thread, and fails for no reason."""
    device = decoder.device
    try:
        _optimize(device)
        to_host(torch.zeros(1, device=device))  # its pinned memory
        if device.type != "cuda":
            return
        if flash_attention.is_supported(device, decoder.dtype, decoder.spec.head_dim):
            attend(decoder, (_ROWS // 4, _ROWS - _ROWS // 4))
            attend(decoder, (_ROWS,))
        torch.cuda.current_stream(device).synchronize()
    except Exception as error:
        logger.warning("the first job's first steps may keep requests waiting: %s", error)


def _optimize(device: torch.device) -> None:
    weight = torch.zeros(1, device=device, requires_grad=True)
    torch.autograd.backward((weight * 0.0).sum())
    optimizer = Optimizer({"weight": weight}, Hyperparameters())
    optimizer.clip()
    optimizer.step(0.0)


def attend(decoder: Decoder, lengths: tuple[int, ...], *, backward: bool = True) -> None:
    """Attention of sequences of these lengths over nothing but zeros, where ``flash_attention`` is supported: a layer's
    forward pass and, with ``backward``, its backward pass."""
    device, spec = decoder.device, decoder.spec

    def heads(count: int) -> torch.Tensor:
        return torch.zeros(sum(lengths), count, spec.head_dim, dtype=decoder.dtype, device=device)

    # They lie as in a layer: a plan is of shapes and strides.
    num_rotated = spec.num_heads + spec.num_kv_heads
    rotated, value = heads(num_rotated), heads(num_rotated + spec.num_kv_heads)[:, num_rotated:]
    sequences = Sequences.of(TrainingSegment(lengths), spec.sliding_window, device)
    attention = FlashAttention(sequences, spec.sliding_window)
    _, kept = attention.keep(rotated[:, : spec.num_heads], rotated[:, spec.num_heads :], value, {})
    if backward:
        kept.backward(heads(spec.num_heads).flatten(1))
