"""Where decode steps read compressed copies of the weights."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from cotenant.config import ModelConfig
from cotenant.core.errors import InvalidInputError
from cotenant.device import Device
from cotenant.models.compressed import compressed_bytes
from cotenant.models.registry import ARCHITECTURES
from cotenant.models.spec import ModelSpec
from cotenant.runtime import compression
from cotenant.runtime.compression import compresses, copy_bytes

GIB = 1 << 30
SPEC = ARCHITECTURES["llama-3.1-8b"]


def _asked(
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    memory_gib: float = 141.0,
    capability: tuple[int, int] = (9, 0),
    device: str = "cuda",
    quantization: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    spec: ModelSpec = SPEC,
) -> bool:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(compression, "has_triton", lambda: True)
    total = int(memory_gib * GIB)
    there = SimpleNamespace(torch_device=torch.device(device), memory_bytes=lambda: (total, total))
    config = ModelConfig("m", quantization=quantization, compress_weights=how)
    return compresses(config, cast(Device, there), spec, dtype)


def test_the_copies_of_an_8b_model() -> None:
    matrices = SPEC.num_layers * (6144 * 4096 + 4096 * 4096 + 28672 * 4096 + 4096 * 14336)
    assert copy_bytes(SPEC) == matrices * 3 // 2 + compressed_bytes(128256, 4096)
    assert copy_bytes(replace(SPEC, vocab_size=128255)) == matrices * 3 // 2  # the head stays as it is


@pytest.mark.parametrize(("how", "memory_gib", "expected"), [
    ("auto", 141, True), ("auto", 80, False), ("on", 80, True), ("off", 141, False),
])  # fmt: skip
def test_it_is_for_gpus_with_memory_to_spare(
    how: str, memory_gib: float, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _asked(how, monkeypatch, memory_gib=memory_gib) == expected


@pytest.mark.parametrize(
    ("differs", "problem"),
    [
        ({"device": "cpu"}, "needs an NVIDIA GPU"),
        ({"capability": (8, 9)}, "needs compute capability 9.0 or more, but a GPU has 8.9"),
        ({"quantization": "fp8"}, "weights in fp8 are smaller already"),
        ({"dtype": torch.float16}, "goes with --dtype bfloat16, not float16"),
        ({"spec": replace(SPEC, intermediate_size=14400)}, "down_proj is 4096 by 14400"),
    ],
)
def test_where_it_cannot_be_that_is_said_to_whom_asks(
    differs: dict[str, object], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not _asked("auto", monkeypatch, **differs)  # type: ignore[arg-type]
    assert not _asked("off", monkeypatch, **differs)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=f"--compress-weights on: .*{problem}.*; leave it out") as caught:
        _asked("on", monkeypatch, **differs)  # type: ignore[arg-type]
    assert caught.value.param == "compress-weights"
