"""How tokens are filtered before one is drawn, and whether those that were drawn are of a distribution."""

from __future__ import annotations

import torch

NUM_DRAWS = 6000


def assert_drawn_from(expected: torch.Tensor, observed: torch.Tensor) -> None:
    assert observed[expected == 0].sum() == 0
    # Five standard deviations of a count; the seeds are fixed, so this cannot flake.
    assert ((observed - expected).abs() <= 5 * (expected * (1 - expected) / NUM_DRAWS).sqrt() + 2 / NUM_DRAWS).all()


FILTERS = {
    "plain": {},
    "temperature": {"temperature": 0.5},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 5},
    "top_k_1": {"top_k": 1},
    "top_p": {"top_p": 0.6},
    "top_p_tiny": {"top_p": 1e-6},
    "min_p": {"min_p": 0.2},
    "all": {"temperature": 1.7, "top_k": 12, "top_p": 0.8},
    "top_k_over_vocab": {"top_k": 10_000},
}
