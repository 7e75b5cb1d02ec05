"""Where decode steps read compressed copies of the weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cotenant.config import ModelConfig
from cotenant.core.errors import InvalidInputError
from cotenant.models.registry import ARCHITECTURES
from cotenant.models.spec import ModelSpec
from cotenant.runtime import compression
from cotenant.runtime.compression import compresses

SPEC = ARCHITECTURES["llama-3.1-8b"]


def _asked(
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    capability: tuple[int, int] = (9, 0),
    device: str = "cuda",
    quantization: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    spec: ModelSpec = SPEC,
) -> bool:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(compression, "has_triton", lambda: True)
    config = ModelConfig("m", quantization=quantization, compress_weights=how)
    return compresses(config, torch.device(device), spec, dtype)


@pytest.mark.parametrize(("how", "expected"), [("on", True), ("off", False)])
def test_it_is_done_where_it_is_asked_for(how: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _asked(how, monkeypatch) == expected


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
    assert not _asked("off", monkeypatch, **differs)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=f"--compress-weights on: .*{problem}.*; leave it out") as caught:
        _asked("on", monkeypatch, **differs)  # type: ignore[arg-type]
    assert caught.value.param == "compress-weights"
