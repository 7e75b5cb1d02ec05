"""The memory that a job needs at least, so that one that cannot fit is refused before its first step."""

from __future__ import annotations

import torch

from cotenant.core.errors import CotenantError
from cotenant.finetune.captured_loss import part_size
from cotenant.finetune.loss import chunk_bytes
from cotenant.models.attention import MOST_PADDED
from cotenant.models.spec import ModelSpec

# In float32: the weight, its gradient in the micro-batch and over the step, and the optimizer's two moments.
# In half precision: the weight as captured layers read it; up to three modules share a matrix of as many blocks.
_STATE_BYTES_PER_WEIGHT = 5 * 4 + 3 * 2
_MIB = 1 << 20
WAYS_OUT = (
    "Leave training more memory (on a GPU: --gpu-memory-utilization), or create a job with a lower max_length or r."
)


def activation_bytes(spec: ModelSpec, num_tokens: int, dtype: torch.dtype, num_recomputed: int = 0) -> int:
    """What a micro-batch keeps at the end of its forward pass, and what its loss or a layer's backward takes on top.
    ``num_recomputed``: of the layers, the first ones, that keep their inputs alone, the last one not among them.
    They have their tapes one at a time, when those of all others are gone."""
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    attended = spec.num_heads * spec.head_dim
    # A layer's tape: input, projected and rotated heads (these and their result padded), the middle, gate and up.
    attention = int(2 * MOST_PADDED * (heads + attended))
    tape = 2 * spec.hidden_size + heads + attention + 2 * spec.intermediate_size
    kept = spec.hidden_size * num_recomputed + tape * (spec.num_layers - num_recomputed)
    return num_tokens * kept * dtype.itemsize + passing_bytes(spec, num_tokens, dtype)


def passing_bytes(spec: ModelSpec, num_tokens: int, dtype: torch.dtype) -> int:
    """What a pass takes that keeps nothing: a validation's, or the most that a layer or a loss takes on top."""
    return _layer_bytes(spec, num_tokens, dtype) + _loss_bytes(spec, num_tokens, dtype)


def captured_bytes(spec: ModelSpec, num_tokens: int, dtype: torch.dtype) -> int:
    """What a lane's graphs hold beside what lies at fixed addresses: of a part of a layer, and a part of the loss."""
    return _layer_bytes(spec, num_tokens, dtype) + _loss_bytes(spec, part_size(num_tokens), dtype)


def _loss_bytes(spec: ModelSpec, num_tokens: int, dtype: torch.dtype) -> int:
    return 3 * min(chunk_bytes(dtype), num_tokens * spec.vocab_size * 4)


def _layer_bytes(spec: ModelSpec, num_tokens: int, dtype: torch.dtype) -> int:
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return num_tokens * (5 * spec.intermediate_size + 6 * spec.hidden_size + 4 * heads) * dtype.itemsize


def state_bytes(num_weights: int) -> int:
    """Of an adapter with so many elements in training."""
    return num_weights * _STATE_BYTES_PER_WEIGHT


def require_state(
    spec: ModelSpec, dtype: torch.dtype, num_weights: int, longest: int, longest_measured: int, free_bytes: int
) -> int:
    """``state_bytes``. Raises CotenantError, with the bytes that are lacking, if there is room for no more than that:
    the longest example (a pair is one), ``longest`` tokens, or that of the validation file, ``longest_measured`` tokens
    (0: there is none), needs some as well. How much is known once the adapter is there; here it is a bound."""
    taken = state_bytes(num_weights)
    if taken >= free_bytes:
        trained = activation_bytes(spec, longest, dtype, spec.num_layers - 1)
        needed = taken + max(trained, passing_bytes(spec, longest_measured, dtype))
        raise lacking_room(needed, free_bytes, longest, longest_measured)
    return taken


def lacking_room(needed_bytes: int, free_bytes: int, longest: int, longest_measured: int) -> CotenantError:
    """For a job that needs more than there is even for its longest examples alone."""
    lacking = needed_bytes - free_bytes
    in_validation = f" ({longest_measured} in the validation file)" if longest_measured > longest else ""
    return CotenantError(
        f"The job needs {needed_bytes} bytes ({_mib(needed_bytes)}) at least for its longest example, {longest} "
        f"tokens{in_validation}, and its adapter; there are {free_bytes} for it, so {lacking} ({_mib(lacking)}) are "
        "lacking. " + WAYS_OUT,
        code="insufficient_memory",
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.0f} MiB"
