"""Where decode steps read compressed copies of the weights."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cotenant.config import CacheConfig, ModelConfig
from cotenant.core.errors import InvalidInputError
from cotenant.models.loading import load_decoder
from cotenant.models.lora import MODULE_GROUPS
from cotenant.models.registry import ARCHITECTURES, ResolvedModel, resolve_model
from cotenant.models.spec import ModelSpec
from cotenant.runtime import compression
from cotenant.runtime.compression import compresses, copies_bytes, tell

SPEC = ARCHITECTURES["llama-3.1-8b"]
MUCH = 140 << 30  # as an H200 has
CACHE = CacheConfig()


def _asked(
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    capability: tuple[int, int] = (9, 0),
    device: str = "cuda",
    quantization: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    spec: ModelSpec = SPEC,
    total_memory: float = MUCH,
    cache: CacheConfig = CACHE,
) -> bool:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    properties = SimpleNamespace(total_memory=total_memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(compression, "has_triton", lambda: True)
    config = ModelConfig("m", quantization=quantization, compress_weights=how)
    return compresses(config, cache, torch.device(device), spec, dtype)


@pytest.mark.parametrize(("how", "expected"), [("on", True), ("off", False), ("auto", True)])
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
    for how in ("off", "auto"):
        assert not _asked(how, monkeypatch, **differs)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=f"--compress-weights on: .*{problem}.*; leave it out") as caught:
        _asked("on", monkeypatch, **differs)  # type: ignore[arg-type]
    assert caught.value.param == "compress-weights"


def test_nobody_who_has_not_asked_gives_much_memory_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A tenth of what the server may use at most, which is told."""
    caplog.set_level("INFO")
    most = 10 * copies_bytes(SPEC) / CACHE.gpu_memory_utilization
    assert not _asked("auto", monkeypatch, total_memory=0.99 * most)
    (record,) = caplog.records
    assert record.getMessage() == "--compress-weights auto: not done, copies take 10.5 GiB, more than 0.1 of 103.8"
    assert _asked("on", monkeypatch, total_memory=0.99 * most)
    assert _asked("auto", monkeypatch, total_memory=1.01 * most)
    assert not _asked("auto", monkeypatch, cache=CacheConfig(gpu_memory_utilization=0.7))


def test_pages_that_were_asked_for_lose_nothing_to_copies_that_were_not(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CacheConfig(num_pages=58_000)
    assert not _asked("auto", monkeypatch, cache=cache)
    assert _asked("on", monkeypatch, cache=cache)


@pytest.mark.parametrize(("how", "expected"), [("auto", False), ("on", True)])
@pytest.mark.parametrize("differs", [{"capability": (10, 0)}, {"spec": replace(SPEC, num_layers=1, vocab_size=1024)}])
def test_where_it_was_not_found_to_pay_it_is_done_for_whom_asks(
    differs: dict[str, object], how: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _asked(how, monkeypatch, **differs) == expected  # type: ignore[arg-type]


def test_copies_take_three_quarters_of_the_matrices() -> None:
    layers = sum(math.prod(SPEC.group_shape(modules)) for modules in MODULE_GROUPS) * SPEC.num_layers
    assert copies_bytes(SPEC) == 0.75 * torch.bfloat16.itemsize * (layers + SPEC.vocab_size * SPEC.hidden_size)


@pytest.mark.parametrize(("how", "warned"), [("on", True), ("auto", False)])
def test_who_asked_is_told_that_nothing_gets_smaller(how: str, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    decoder = load_decoder(resolve_model(ModelConfig("tiny")), torch.device("cpu"), torch.float32, 0, compress=True)
    tell(ModelConfig("tiny", compress_weights=how), decoder)
    assert ("none of the model's matrices gets smaller" in caplog.text) == warned


def test_what_copies_take_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    small = {"num_layers": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 2, "num_kv_heads": 1}
    spec = replace(SPEC, **small, head_dim=64, vocab_size=1000)  # which leaves the head without
    resolved = ResolvedModel("m", None, spec, random_weights=True)
    decoder = load_decoder(resolved, torch.device("cpu"), torch.bfloat16, 0, compress=True)
    layers = sum(math.prod(spec.group_shape(modules)) for modules in MODULE_GROUPS) * spec.num_layers
    lists = decoder.weights.copies_bytes - 1.5 * layers
    assert 0 < lists < 0.1 * layers
    tell(ModelConfig("m"), decoder)
    assert caplog.messages == ["decode steps read compressed copies of the weights: 0.0 GiB (--compress-weights)"]
