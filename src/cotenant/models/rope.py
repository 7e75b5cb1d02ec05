"""Rotary position embeddings (Su et al., RoFormer, section 3.2), in the halves layout of the Llama family."""

from __future__ import annotations

import math

import torch

from cotenant.models.spec import ModelSpec, RopeScaling


def inverse_frequencies(spec: ModelSpec) -> torch.Tensor:
    """Radians per position of each rotated pair: [head_dim / 2], float32, on the CPU."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    frequencies = 1.0 / (spec.rope_theta**exponents)
    if spec.rope_scaling is None:
        return frequencies
    if spec.rope_scaling.kind == "linear":
        return frequencies / spec.rope_scaling.factor
    return _llama3(frequencies, spec.rope_scaling)


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slow frequencies are divided by the factor, fast ones kept, and those between are interpolated."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # share of the unscaled frequency
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


class RopeTables:
    """Cosines and sines of every position up to ``max_position_embeddings``, in the model's dtype."""

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        positions = torch.arange(spec.max_position_embeddings, dtype=torch.float32, device=device)
        angles = torch.outer(positions, inverse_frequencies(spec).to(device))  # [positions, head_dim / 2]
        self.table = torch.cat([angles.cos(), angles.sin()], dim=1).to(dtype)  # [positions, head_dim]

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines at ``positions`` [tokens], each [tokens, 1, head_dim], as ``rotate`` takes them."""
        cos, sin = self.table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``heads`` [tokens, heads, head_dim]: dimension i makes a pair with i + head_dim / 2."""
    partners = heads.roll(heads.shape[-1] // 2, dims=-1)
    return (heads * cos).add_(partners.mul_(signed_sin))
