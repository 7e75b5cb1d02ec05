"""How wide heads lie in the KV cache of a GPU, where there is none to ask."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cotenant.core.errors import InvalidInputError
from cotenant.models import paged_attention
from cotenant.models.attention_kernels import AttentionKernels
from cotenant.models.paged_attention import cache_head_dim, is_supported
from cotenant.models.registry import ARCHITECTURES

CUDA = torch.device("cuda")


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer and Triton are there, and a GPU."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(paged_attention, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))


@pytest.mark.usefixtures("packages")
def test_older_gpus_have_torchs_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ARCHITECTURES["llama-3.1-8b"]
    assert is_supported(spec, CUDA, torch.float16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not is_supported(spec, CUDA, torch.float16)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("missing", [None, "nvcc", "ninja", "c++"])
@pytest.mark.parametrize(
    ("head_dim", "compiled", "without"),
    [(32, 64, 32), (64, 64, 64), (80, 128, 80), (128, 128, 128), (130, 256, 130), (256, 256, 256), (320, 320, 320)],
)
def test_narrower_heads_have_the_room_of_wider_ones(
    head_dim: int, compiled: int, without: int, missing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where their kernels can be compiled. Without, the server says what is missing for heads of the kernels' own
    widths, and others are served by torch's own attention."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in {"nvcc", "ninja", "c++"} - {missing}:
        (programs / name).touch(0o755)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("CXX", raising=False)
    spec = replace(ARCHITECTURES["llama-3.1-8b"], head_dim=head_dim)
    width = cache_head_dim(spec, CUDA, torch.bfloat16)
    assert width == (without if missing else compiled)
    assert is_supported(spec, CUDA, torch.bfloat16) == (width in (64, 128, 256))
    assert cache_head_dim(spec, CUDA, torch.float32) == head_dim
    assert cache_head_dim(spec, torch.device("cpu"), torch.bfloat16) == head_dim


@pytest.mark.usefixtures("packages")
def test_ninja_is_found_beside_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `make install`, when the virtual environment is not activated."""
    for folder, names in (("system", ("nvcc", "c++")), ("venv", ("ninja", "python"))):
        (tmp_path / folder / "bin").mkdir(parents=True)
        for name in names:
            (tmp_path / folder / "bin" / name).touch(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "system"))
    monkeypatch.setenv("PATH", str(tmp_path / "system" / "bin"))
    monkeypatch.delenv("CXX", raising=False)
    spec = replace(ARCHITECTURES["llama-3.1-8b"], head_dim=32)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "system" / "bin" / "python"))
    assert cache_head_dim(spec, CUDA, torch.bfloat16) == 32
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    assert cache_head_dim(spec, CUDA, torch.bfloat16) == 64
    assert shutil.which("ninja") is None, "who asks changes nothing"
    kernels = AttentionKernels(64, torch.bfloat16, False, ("fa2",))
    with pytest.raises(InvalidInputError, match=r"nvcc, ninja and a C\+\+ compiler"):  # nothing to compile here
        kernels.wait("fa2")
    assert shutil.which("ninja") == str(tmp_path / "venv" / "bin" / "ninja")
