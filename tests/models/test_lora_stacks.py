"""Adapters in slots: every row gets its own adapter's delta, and a slot gives back what was put into it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cotenant.core.job import LINEAR_MODULES
from cotenant.models.batch import AdapterSpan, Batch, TrainingSegment
from cotenant.models.fused_linear import FusedLinear
from cotenant.models.linear import linear
from cotenant.models.lora import MODULE_GROUPS, LoraAdapter
from cotenant.models.lora_stacks import GroupedLora, LoraStacks, stack_bytes
from models import support
from models.support import Pair, tokens

OPTIONS: list[dict[str, Any]] = [
    {"r": 16, "target_modules": LINEAR_MODULES},
    {"r": 3, "alpha": 5.0, "target_modules": ("k_proj", "o_proj", "up_proj"), "use_rslora": True},
    {"r": 21, "target_modules": ("q_proj", "v_proj", "gate_proj", "down_proj")},
]


@pytest.fixture(scope="module")
def adapters(llama: Pair) -> list[LoraAdapter]:
    return [support.random_adapter(llama.decoder, seed, **option) for seed, option in enumerate(OPTIONS)]


def _stacks(pair: Pair, num_slots: int = 4, max_rank: int = 21) -> LoraStacks:
    return LoraStacks(pair.decoder.spec, num_slots, max_rank, support.CPU, torch.float32)


def _bases(pair: Pair) -> list[FusedLinear]:
    layer = pair.decoder.weights.layers[1]
    return [layer.qkv, layer.output, layer.gate_up, layer.down]


def _logits(pair: Pair, adapter: LoraAdapter) -> torch.Tensor:
    with torch.no_grad():
        return pair.decoder.logits(pair.decoder.forward(support.training_batch([tokens(11), tokens(6)], adapter)))


@pytest.mark.parametrize(
    "slots",
    [[-1, -1], [2], [0] * 20, [-1, 0, 0, 2, 2, 2, 3], [3, -1, 0, 3, 2, 0, -1]],
    ids=lambda slots: str(len(slots)),
)
def test_each_row_gets_its_adapters_delta(llama: Pair, adapters: list[LoraAdapter], slots: list[int]) -> None:
    stacks = _stacks(llama)
    placed = dict(zip((2, 0, 3), adapters, strict=True))
    for slot, adapter in placed.items():
        stacks.load(slot, stacks.pack(adapter))
    grouped = GroupedLora.of(stacks, slots)
    for base, modules in zip(_bases(llama), MODULE_GROUPS, strict=True):
        assert base.modules == modules
        x = torch.randn(len(slots), base.weight.shape[1])
        with torch.no_grad():
            ours = linear(x, base, 1, grouped=grouped)
            spans = [AdapterSpan(row, row + 1, placed[slot]) for row, slot in enumerate(slots) if slot >= 0]
            torch.testing.assert_close(ours, linear(x, base, 1, spans))
            assert torch.equal(ours[grouped.slots < 0], base.product(x)[grouped.slots < 0])
            some = torch.tensor([len(slots) - 1, 0])
            torch.testing.assert_close(linear(x[some], base, 1, grouped=grouped.at(some)), ours[some])


def test_an_adapter_in_a_slot_serves_spans_too(llama: Pair, adapters: list[LoraAdapter]) -> None:
    """Slots are used again, by adapters of higher and of lower rank; the others keep theirs, at the same address."""
    stacks = _stacks(llama, num_slots=2)
    address = stacks.storage.data_ptr()
    kept = stacks.load(1, stacks.pack(adapters[1]))
    for adapter in (adapters[0], adapters[2], adapters[1], adapters[0]):
        placed = stacks.load(0, stacks.pack(adapter))
        assert (placed.slot, kept.slot) == (0, 1)
        torch.testing.assert_close(_logits(llama, placed), _logits(llama, adapter), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(_logits(llama, kept), _logits(llama, adapters[1]), atol=1e-4, rtol=1e-4)
    assert stacks.storage.data_ptr() == address


def test_loading_a_slot_leaves_a_backward_beside_it_alone(llama: Pair, adapters: list[LoraAdapter]) -> None:
    stacks = _stacks(llama)
    trained = support.random_adapter(llama.decoder, 8)

    def gradients(load: Sequence[LoraAdapter]) -> list[torch.Tensor]:
        served = stacks.load(0, stacks.pack(adapters[0]))
        batch = support.training_batch([tokens(9), tokens(7)])
        spans = (AdapterSpan(0, 9, served), AdapterSpan(9, 16, trained))
        batch = Batch(batch.token_ids, batch.positions, (TrainingSegment((9, 7)),), spans)
        logits = llama.decoder.logits(llama.decoder.forward(batch))
        for adapter in load:
            stacks.load(0, stacks.pack(adapter))
        logits[9:].logsumexp(dim=1).sum().backward()
        found = [parameter.grad for parameter in trained.parameters() if parameter.grad is not None]
        for parameter in trained.parameters():
            parameter.grad = None
        return found

    expected = gradients([])
    assert any(gradient.any() for gradient in expected)
    for ours, theirs in zip(gradients(adapters[1:]), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("max_rank", "dtype"), [(1, torch.float32), (16, torch.bfloat16), (33, torch.float16)])
def test_the_stated_bytes_are_those_that_are_taken(llama: Pair, max_rank: int, dtype: torch.dtype) -> None:
    stacks = LoraStacks(llama.decoder.spec, 3, max_rank, support.CPU, dtype)
    taken = stacks.storage.untyped_storage().nbytes()
    assert stack_bytes(llama.decoder.spec, 3, max_rank, dtype) == taken


def test_an_adapter_costs_the_bytes_of_its_own_rank(llama: Pair) -> None:
    stacks = _stacks(llama, max_rank=64)
    sizes = {rank: stacks.pack(support.random_adapter(llama.decoder, 1, r=rank)).num_bytes for rank in (1, 16, 17, 64)}
    assert sizes[1] == sizes[16] == sizes[17] / 2 == sizes[64] / 4
    assert 4 * sizes[64] == stack_bytes(llama.decoder.spec, 4, 64, torch.float32)
