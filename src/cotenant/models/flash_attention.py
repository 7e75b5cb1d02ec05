"""Attention of training on CUDA in half precision: forward and backward as single operations, without autograd.

Sequences of one length go to cuDNN, which is the faster one on Hopper; others to FlashAttention, which takes them one
behind the other without padding. Both come with torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cotenant.device.upload import upload
from cotenant.models.batch import TrainingSegment

_MAX_HEAD_DIM = 128
_UNIFORM_BLOCK = 128


def is_supported(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether ``FlashAttention`` runs there."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim <= _MAX_HEAD_DIM
        and head_dim % 8 == 0
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


@dataclass(frozen=True, slots=True)
class Sequences:
    """What attention has to know of the sequences. ``starts`` [sequences + 1], int32, on the device: where each begins,
    then the end; sequences may be empty. None: all have ``longest`` tokens."""

    num_sequences: int
    longest: int
    starts: torch.Tensor | None

    @classmethod
    def of(cls, segment: TrainingSegment, sliding_window: int | None, device: torch.device) -> Sequences:
        lengths, longest = segment.lengths, max(segment.lengths)
        if is_uniform(lengths, sliding_window, device):
            return cls(len(lengths), longest, None)
        starts = upload(torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32), device)
        return cls(len(lengths), longest, starts)


def is_uniform(lengths: tuple[int, ...], sliding_window: int | None, device: torch.device) -> bool:
    """Whether these sequences are left to cuDNN, which knows neither several lengths nor windows, and plans anew for
    each length: full rows are worth that, a sequence that happens to be alone is not."""
    longest = max(lengths)
    is_full_row = min(lengths) == longest and longest % _UNIFORM_BLOCK == 0
    inside = sliding_window is None or longest <= sliding_window
    return is_full_row and inside and torch.cuda.get_device_capability(device) >= (9, 0)


class KeptFlash(NamedTuple):
    """See ``KeptAttention``."""

    attention: FlashAttention
    query: torch.Tensor  # [tokens, heads, head_dim]
    key: torch.Tensor  # [tokens, kv_heads, head_dim]
    value: torch.Tensor  # [tokens, kv_heads, head_dim]
    out: torch.Tensor  # [tokens, heads * head_dim]
    logsumexp: torch.Tensor  # float32 [heads * tokens], in the kernel's order
    rest: tuple[torch.Tensor, ...]  # what the kernel says about dropout, of which there is none

    def backward(self, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of query, key and value, each of its shape."""
        return self.attention.backward(self, gradient)


class FlashAttention:
    """Whole sequences, each attending to itself alone, causally, within ``sliding_window``."""

    def __init__(self, sequences: Sequences, sliding_window: int | None) -> None:
        self._sequences = sequences
        self._window = -1 if sliding_window is None else sliding_window - 1

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor | None
    ) -> torch.Tensor:
        return self._forward(query, key, value)[0]

    def keep(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        buffers: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, KeptFlash]:
        """See ``KeepingAttention``."""
        out, sums, rest = self._forward(query, key, value)
        out, sums = (
            tensor if name not in buffers else buffers[name].copy_(tensor)
            for name, tensor in (("attended", out), ("logsumexp", sums.flatten()))
        )
        return out, KeptFlash(self, query, key, value, out, sums, rest)

    def _forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        count, longest, starts = self._sequences.num_sequences, self._sequences.longest, self._sequences.starts
        if starts is None:
            inputs = (self._dense(tensor) for tensor in (query, key, value))
            out, sums, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
                *inputs, None, True, 0.0, True, False
            )
            return out.transpose(1, 2).reshape(count * longest, -1), sums, (seed, offset)
        out, sums, seed, offset, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, starts, starts, longest, longest, 0.0, True, False, window_size_left=self._window,
            window_size_right=0 if self._window >= 0 else -1,
        )  # fmt: skip
        return out.flatten(1), sums, (seed, offset)

    def backward(self, kept: KeptFlash, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        count, longest, starts = self._sequences.num_sequences, self._sequences.longest, self._sequences.starts
        heads = kept.query.shape[1]
        gradient, out = (tensor.view(len(tensor), heads, -1) for tensor in (gradient, kept.out))
        if starts is None:
            inputs = (self._dense(tensor) for tensor in (gradient, kept.query, kept.key, kept.value, out))
            gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                *inputs, kept.logsumexp.view(count, heads, longest, 1), *kept.rest, None, None, None,
                longest, longest, 0.0, True,
            )  # fmt: skip
            query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in gradients)
            return query, key, value
        query, key, value = torch.ops.aten._flash_attention_backward(
            gradient, kept.query, kept.key, kept.value, out, kept.logsumexp.view(heads, -1), starts, starts,
            longest, longest, 0.0, True, *kept.rest, window_size_left=self._window,
            window_size_right=0 if self._window >= 0 else -1,
        )  # fmt: skip
        return query, key, value

    def _dense(self, tensor: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, dim] -> [sequences, heads, tokens of each, dim]"""
        shape = (self._sequences.num_sequences, self._sequences.longest, *tensor.shape[1:])
        return tensor.view(shape).transpose(1, 2)
