"""How wide heads lie in the KV cache of a GPU, where there is none to ask."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cotenant.models import paged_attention
from cotenant.models.paged_attention import cache_head_dim, is_supported
from cotenant.models.registry import ARCHITECTURES

CUDA = torch.device("cuda")


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer and Triton are there."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(paged_attention, "has_triton", lambda: True)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("has_nvcc", [True, False])
@pytest.mark.parametrize(
    ("head_dim", "with_nvcc", "without"),
    [(32, 64, 32), (64, 64, 64), (80, 128, 80), (128, 128, 128), (130, 256, 130), (256, 256, 256), (320, 320, 320)],
)
def test_narrower_heads_have_the_room_of_wider_ones(
    head_dim: int, with_nvcc: int, without: int, has_nvcc: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where their kernels can be compiled. Without, the server says what is missing for heads of the kernels' own
    widths, and others are served by torch's own attention."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    if has_nvcc:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvcc").touch()
    spec = replace(ARCHITECTURES["llama-3.1-8b"], head_dim=head_dim)
    width = cache_head_dim(spec, CUDA, torch.bfloat16)
    assert width == (with_nvcc if has_nvcc else without)
    assert is_supported(spec, CUDA, torch.bfloat16) == (width in (64, 128, 256))
    assert cache_head_dim(spec, CUDA, torch.float32) == head_dim
    assert cache_head_dim(spec, torch.device("cpu"), torch.bfloat16) == head_dim
