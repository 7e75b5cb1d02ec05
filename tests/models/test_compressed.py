"""Compressed matrices are the matrices, bit for bit, in three quarters of the bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.models.compressed import CompressedWeight, compress, decompress
from cotenant.models.loading import load_decoder
from cotenant.models.registry import ARCHITECTURES, ResolvedModel, model_path, read_spec


def _bits(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.int16)


def _normal(num_out: int = 256, num_in: int = 384, seed: int = 0) -> torch.Tensor:
    return (torch.randn(num_out, num_in, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()


def _compressed(weight: torch.Tensor) -> CompressedWeight:
    compressed = compress(weight)
    assert compressed is not None
    return compressed


@settings(max_examples=30)
@given(
    blocks=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    scale=st.sampled_from([1e-30, 1e-3, 0.02, 1.0, 1e20]),
    seed=st.integers(0, 2**31),
    others=st.lists(st.integers(0, 2**16 - 1), max_size=40),
)
def test_every_bit_comes_back(blocks: tuple[int, int], scale: float, seed: int, others: list[int]) -> None:
    """With any other numbers among them: zeros of both signs, infinities, NaN, denormal ones."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(128 * blocks[0], 128 * blocks[1], generator=generator) * scale).bfloat16()
    at = torch.randint(weight.numel(), (len(others),), generator=generator)
    _bits(weight).view(-1)[at] = torch.tensor(others, dtype=torch.int32).to(torch.int16)
    compressed = _compressed(weight)
    assert compressed.shape == weight.shape
    assert torch.equal(_bits(decompress(compressed)), _bits(weight))


def test_of_normal_weights_three_quarters_of_the_bytes_are_left() -> None:
    weight = _normal(1024, 1024)
    compressed = _compressed(weight)
    assert compressed.blocks.nbytes == weight.nbytes * 3 // 4
    assert compressed.places.nbytes + compressed.values.nbytes < 0.01 * weight.nbytes
    listed = int((compressed.places >= 0).sum())
    assert 0 < listed < 3e-4 * weight.numel()


@pytest.mark.parametrize("num_others", [1, 64, 65, 500])
def test_a_list_is_dealt_out_evenly(num_others: int) -> None:
    """So programs that share a row of blocks have as much to do each."""
    weight = _normal().clamp(-0.05, 0.05)
    weight[weight.abs() < 1e-3] = 0.01
    weight[:128].view(-1)[:num_others] = 0.0
    compressed = _compressed(weight)
    first, second = (compressed.places >= 0).unflatten(1, (4, -1)).sum(2)
    assert first.sum() == num_others
    assert first.max() - first.min() <= 1
    assert second.sum() == 0
    assert compressed.places.shape[1] in (64, 128, 512)
    assert torch.equal(_bits(decompress(compressed)), _bits(weight))


def test_stand_ins_are_what_the_kernel_subtracts() -> None:
    """In the place of a listed weight stands 2**(2 * base - 127), whatever the weight is."""
    weight = _normal()
    weight[5, 7], weight[200, 300] = float("inf"), -0.0
    compressed = _compressed(weight)
    without = compressed._replace(places=torch.full_like(compressed.places, -1))
    stood_in = decompress(without)
    for place in ((5, 7), (200, 300)):
        assert stood_in[place].item() == 2.0 ** (2 * compressed.base - 127)


@pytest.mark.parametrize(
    "weight",
    [
        _normal().to(torch.float16),
        _normal().float(),
        _normal(256, 320),
        _normal(192, 384),
        torch.zeros(256, 384, dtype=torch.bfloat16).masked_fill_(torch.rand(256, 384) < 0.5, 1.0),
    ],
    ids=["float16", "float32", "part of a block across", "part of a block down", "half of it zeros"],
)
def test_what_gains_nothing_is_left_as_it_is(weight: torch.Tensor) -> None:
    assert compress(weight) is None


def test_a_decoder_has_a_copy_of_each_matrix_that_can_be_compressed() -> None:
    """Beside the matrices, which stay as they are; a vocabulary of odd size leaves the head without."""
    small = {"num_layers": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 2, "num_kv_heads": 1}
    spec = replace(ARCHITECTURES["llama-3.1-8b"], **small, head_dim=64, vocab_size=1000)
    resolved = ResolvedModel("m", None, spec, random_weights=True)
    plain, ours = (
        load_decoder(resolved, torch.device("cpu"), torch.bfloat16, seed=3, compress=compresses).weights
        for compresses in (False, True)
    )
    assert (plain.is_compressed, plain.share_read, ours.is_compressed, ours.share_read) == (False, 1.0, True, 0.75)
    for layer, same in zip(ours.layers, plain.layers, strict=True):
        for name in ("qkv", "output", "gate_up", "down"):
            base, expected = getattr(layer, name), getattr(same, name)
            assert torch.equal(base.weight, expected.weight)
            assert torch.equal(decompress(base.compressed), expected.weight)
            assert expected.compressed is None
    assert ours.compressed_head is None
    tied = replace(spec, vocab_size=1024, tie_word_embeddings=True)
    weights = load_decoder(replace(resolved, spec=tied), torch.device("cpu"), torch.bfloat16, 3, compress=True).weights
    assert weights.compressed_head is not None
    assert torch.equal(decompress(weights.compressed_head), weights.embedding)


def test_a_model_that_gains_nothing_stays_as_it_is() -> None:
    resolved = ResolvedModel("tiny", model_path("tiny"), read_spec(model_path("tiny")))  # 192 wide
    decoder = load_decoder(resolved, torch.device("cpu"), torch.bfloat16, seed=0, compress=True)
    assert not decoder.weights.is_compressed


def test_a_block_lies_as_threads_multiply() -> None:
    """A thread's 16 bytes are pairs of input features of two columns, 8 apart, from 32 features; its neighbours have
    the next pairs, then the next columns: what a tensor core takes from the registers of a warp."""
    weight = torch.full((128, 128), 0.01).bfloat16()
    compressed = _compressed(weight)
    whole = compressed.blocks[0, 0].clone()
    moved = {}
    for column, depth in ((0, 0), (0, 1), (8, 0), (0, 8), (0, 16), (0, 2), (1, 0), (16, 0), (64, 0), (0, 32), (0, 64)):
        changed = weight.clone()
        _bits(changed)[column, depth] ^= 1
        (moved[column, depth],) = (_compressed(changed).blocks[0, 0] != whole).nonzero().flatten().tolist()
    assert list(moved.values()) == [0, 1, 2, 4, 8, 16, 64, 512, 2048, 4096, 8192]
