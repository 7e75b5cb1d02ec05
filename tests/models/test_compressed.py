"""Compressed matrices are the matrices, bit for bit, in three quarters of the bytes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.models.compressed import CompressedWeight, compress, decompress
from cotenant.models.loading import load_decoder
from cotenant.models.registry import ARCHITECTURES, ResolvedModel

LIST_AT = 128 * 64 * 3 // 2  # in a block


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
    blocks=st.tuples(st.integers(2, 3), st.integers(3, 6)),
    scale=st.sampled_from([1e-30, 1e-3, 0.02, 1.0, 1e20]),
    seed=st.integers(0, 2**31),
    others=st.lists(st.integers(0, 2**16 - 1), max_size=24),
)
def test_every_bit_comes_back(blocks: tuple[int, int], scale: float, seed: int, others: list[int]) -> None:
    """With any other numbers among them: zeros of both signs, infinities, NaN, denormal ones."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(128 * blocks[0], 64 * blocks[1], generator=generator) * scale).bfloat16()
    at = torch.randint(weight.numel(), (len(others),), generator=generator)
    _bits(weight).view(-1)[at] = torch.tensor(others, dtype=torch.int32).to(torch.int16)
    compressed = _compressed(weight)
    assert compressed.shape == weight.shape
    assert torch.equal(_bits(decompress(compressed)), _bits(weight))


def test_of_normal_weights_three_quarters_of_the_bytes_are_left() -> None:
    weight = _normal(1024, 1024)
    blocks = _compressed(weight).blocks
    assert 0.75 < blocks.nbytes / weight.nbytes < 0.755
    num_listed = int(blocks[:, :, LIST_AT + 15].sum())
    assert 0 < num_listed < 3e-4 * weight.numel()


@pytest.mark.parametrize("num_others", [1, 2, 4, 5, 40, 60])
def test_a_block_lists_what_no_code_stands_for(num_others: int) -> None:
    weight = _within_codes()
    at = torch.randperm(128 * 64, generator=torch.Generator().manual_seed(num_others))[:num_others]
    weight[at // 64, 64 + at % 64] = 0.0
    blocks = _compressed(weight).blocks
    begins, ends = blocks[:, :, LIST_AT : LIST_AT + 16].to(torch.int64).unflatten(2, (8, 2)).unbind(3)
    assert torch.equal(begins[:, :, 1:], ends[:, :, :-1])
    assert ends[0, 1, 7] == num_others
    assert ends.sum(dim=(0, 1))[7] == num_others, "the others list nothing"
    assert blocks.shape[2] == LIST_AT + -(-(16 + 4 * num_others) // 16) * 16
    assert torch.equal(_bits(decompress(_compressed(weight))), _bits(weight))


def test_lists_are_not_long() -> None:
    """The kernel puts weights in their places one by one."""
    weight = _within_codes()
    weight[0, :61] = 0.0
    assert compress(weight) is None
    weight = _within_codes()
    weight[:, ::16] = 0.0
    assert compress(weight) is None, "512 in each block"
    weight = _within_codes()
    weight[::16, ::64] = 0.0
    assert compress(weight) is None, "8 in each block"


def test_threads_put_a_matrix_together() -> None:
    """As the kernel does (compressed_product.cu): what each thread of four warps has of half a block after decoding is
    what the tensor cores want of it."""
    weight = _normal(256, 256)
    weight[3, 5], weight[200, 70], weight[0, 0], weight[130, 130] = 0.0, float("inf"), -0.0, -1e-30
    compressed = _compressed(weight)
    for row, column in itertools.product(range(2), range(4)):
        found = _put_together(compressed.blocks[row, column].numpy(), compressed.base)
        expected = weight[128 * row : 128 * row + 128, 64 * column : 64 * column + 64]
        assert np.array_equal(found, _bits(expected.contiguous()).numpy().view(np.uint16))


def _put_together(block: npt.NDArray[np.uint8], base: int) -> npt.NDArray[np.uint16]:
    """[128, 64]"""
    lower, codes = block[:8192].reshape(2, 2, 4, 32, 4, 4), block[8192:12288].view(np.uint32).reshape(2, 4, 32, 4)
    bounds, entries = block[12288:12304].astype(int).reshape(4, 2, 2), block[12304:].view(np.uint32)
    found = np.zeros((128, 64), np.uint16)
    for half, warp in itertools.product(range(2), range(4)):
        listed = entries[slice(*bounds[warp, half])]
        for lane, columns in itertools.product(range(32), range(2)):
            own = codes[half, warp, lane]
            turned = own if columns == 0 else own >> 4 | own << 28
            upper = ((turned & 0x87878787) + base * 0x01010101).view(np.uint8).reshape(4, 4)
            pairs = (lower[half, columns, warp, lane].astype(np.uint16) | upper.astype(np.uint16) << 8).reshape(8, 2)
            for entry in listed:
                which = int(entry) >> 6 & 15
                if int(entry) & 31 == lane and which >> 2 & 1 == columns:
                    pairs[which >> 3 << 2 | which & 3, int(entry) >> 5 & 1] = int(entry) >> 16
            for place, pair in enumerate(pairs):  # d4, d3, c3
                column = 64 * columns + 16 * warp + lane // 4 + 8 * (place & 1)
                depth = 32 * half + 16 * (place >> 2) + 8 * (place >> 1 & 1) + 2 * (lane % 4)
                found[column, depth : depth + 2] = pair
    return found


def _within_codes() -> torch.Tensor:
    """Weights all of which codes stand for."""
    weight = _normal().clamp(-0.05, 0.05)
    weight[weight.abs() < 1e-3] = 0.01
    return weight


@pytest.mark.parametrize(
    "weight",
    [
        _normal().to(torch.float16),
        _normal().float(),
        _normal(256, 352),
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
    odd = {"num_layers": 1, "hidden_size": 96, "intermediate_size": 160, "num_heads": 2, "num_kv_heads": 1}
    spec = replace(ARCHITECTURES["llama-3.1-8b"], **odd, head_dim=48, vocab_size=1000)
    resolved = ResolvedModel("m", None, spec, random_weights=True)
    decoder = load_decoder(resolved, torch.device("cpu"), torch.bfloat16, seed=0, compress=True)
    assert not decoder.weights.is_compressed


def test_a_block_lies_as_threads_multiply() -> None:
    """A thread's 16 bytes are pairs of input features of two columns, 8 apart, from 32 features; its neighbours have
    the next pairs, then the next columns: what a tensor core takes from the registers of a warp."""
    weight = torch.full((128, 128), 0.01).bfloat16()
    compressed = _compressed(weight)
    whole = compressed.blocks[0, 0].clone()
    moved = {}
    for column, depth in ((0, 0), (0, 1), (8, 0), (0, 8), (0, 16), (0, 2), (1, 0), (16, 0), (64, 0), (0, 32)):
        changed = weight.clone()
        _bits(changed)[column, depth] ^= 1
        (moved[column, depth],) = (_compressed(changed).blocks[0, 0] != whole).nonzero().flatten().tolist()
    assert list(moved.values()) == [0, 1, 2, 4, 8, 16, 64, 512, 2048, 4096]
