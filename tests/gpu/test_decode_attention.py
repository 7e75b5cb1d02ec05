"""The attention of decode steps gives what plain torch operations give, and the same bits whoever else is there."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from cotenant.models import decode_chunks
from cotenant.models.skinny_tiling import sms_at_hand

pytest.importorskip("triton")

CUDA = torch.device("cuda")
BF16, FP16 = torch.bfloat16, torch.float16


class Shape(NamedTuple):
    width: int = 128
    kv_heads: int = 8
    group: int = 4
    page_tokens: int = 16
    window: int | None = None
    dtype: torch.dtype = BF16


SHAPES = (
    Shape(),
    Shape(dtype=FP16),
    Shape(width=64, kv_heads=2, group=7),
    Shape(kv_heads=2, group=8, page_tokens=32),
    Shape(kv_heads=1, group=16),
    Shape(kv_heads=3, group=12, page_tokens=4, window=50),
    Shape(width=256, kv_heads=2),
    Shape(width=256, kv_heads=1, group=8, page_tokens=128),
    Shape(kv_heads=2, page_tokens=1),
    Shape(kv_heads=2, page_tokens=8),
    Shape(kv_heads=2, page_tokens=128, window=100),
    Shape(width=64, kv_heads=3, group=1, window=333, dtype=FP16),
)
LENGTHS = ([1], [16, 17, 1, 15], [int(length) for length in np.geomspace(2, 4500, 17)], [9000, 3, 700])


class Sequences:
    """Their keys and values lie anywhere in the cache, in whose other rows there are no numbers."""

    def __init__(self, shape: Shape, lengths: list[int], num_layers: int = 2) -> None:
        self.shape, self.lengths = shape, lengths
        counts = [-(-length // shape.page_tokens) for length in lengths]
        self.indptr = np.array([0, *itertools.accumulate(counts)], dtype=np.int32)
        pages = torch.randperm(sum(counts) + 3)[: sum(counts)]
        size = (sum(counts) + 3, num_layers, 2, shape.page_tokens, shape.kv_heads, shape.width)
        self.cache = torch.full(size, float("nan"), device=CUDA, dtype=shape.dtype)
        self.pages = pages.numpy().astype(np.int32)
        for index, length in enumerate(lengths):
            for place, page in enumerate(self.pages[self.indptr[index] : self.indptr[index + 1]]):
                rows = min(shape.page_tokens, length - place * shape.page_tokens)
                self.cache[int(page), :, :, :rows].normal_()
        self.query = torch.randn(
            len(lengths), shape.kv_heads * shape.group, shape.width, device=CUDA, dtype=shape.dtype
        )

    def expected(self, layer: int) -> torch.Tensor:
        shape, found = self.shape, []
        for index, length in enumerate(self.lengths):
            mine = torch.from_numpy(self.pages[self.indptr[index] : self.indptr[index + 1]]).long()
            first = 0 if shape.window is None else max(0, length - shape.window)
            keys, values = (
                part.flatten(0, 1)[first:length].double().repeat_interleave(shape.group, 1)
                for part in self.cache[mine, layer].unbind(1)
            )
            scores = torch.einsum("hd,thd->ht", self.query[index].double(), keys) / math.sqrt(shape.width)
            found.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values))
        return torch.stack(found)

    def attention(self, num_sequences: int | None = None) -> Any:
        from cotenant.models.kernels.decode_attention import DecodeAttention

        shape = self.shape
        spec: Any = SimpleNamespace(
            num_heads=shape.kv_heads * shape.group,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.width,
            sliding_window=shape.window,
        )
        room = num_sequences or len(self.lengths)
        return DecodeAttention(spec, CUDA, shape.dtype, shape.width, shape.page_tokens, room, max(self.lengths))

    def lists(self, rows: list[int]) -> torch.Tensor:
        """Of some of the sequences, in this order."""
        shape = self.shape
        pages = [self.pages[self.indptr[row] : self.indptr[row + 1]] for row in rows]
        indptr = np.array([0, *itertools.accumulate(map(len, pages))], dtype=np.int32)
        units = decode_chunks.num_units(shape.kv_heads * shape.group, shape.kv_heads)
        chunks = decode_chunks.cut(indptr, [self.lengths[row] for row in rows], shape.window, units)
        return torch.from_numpy(np.concatenate([chunks, *pages])).to(CUDA)

    def run(self, attention: Any, rows: list[int], layer: int = 1) -> torch.Tensor:
        query = self.query[rows].contiguous()
        out = torch.full_like(query, float("nan"))
        return attention(query, self.cache[:, layer], self.lists(rows), out)  # type: ignore[no-any-return]


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} to {max(lengths)}")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_what_torch_computes(shape: Shape, lengths: list[int]) -> None:
    sequences = Sequences(shape, lengths)
    attention, rows = sequences.attention(), list(range(len(lengths)))
    for layer in range(2):
        found, expected = sequences.run(attention, rows, layer), sequences.expected(layer)
        error = (found.double() - expected).norm() / expected.norm()
        assert error < (4e-3 if shape.dtype == BF16 else 5e-4)


@pytest.mark.parametrize("shape", [Shape(), Shape(width=64, kv_heads=5, group=7, window=600)], ids=str)
def test_neither_others_nor_the_number_of_sms_change_a_bit(shape: Shape) -> None:
    lengths = [300, 1, 4200, 256, 257, 1030, 6, 2048, 9000]
    sequences = Sequences(shape, lengths)
    attention, rows = sequences.attention(), list(range(len(lengths)))
    whole = sequences.run(attention, rows)
    assert whole.isfinite().all()
    for count in (1, 5, 48):  # fewer programs than units of work, some of which take many
        with sms_at_hand(count):
            assert torch.equal(sequences.run(attention, rows), whole)
    backwards = rows[::-1]
    assert torch.equal(sequences.run(attention, backwards), whole[backwards])
    for row in rows:  # beside others, the same number of them
        others = [row, *(3 for _ in rows[1:])]
        assert torch.equal(sequences.run(attention, others)[0], whole[row])


def test_rows_behind_the_sequences_are_left_alone() -> None:
    sequences = Sequences(Shape(), [40, 700])
    query = torch.randn(4, 32, 128, device=CUDA, dtype=BF16)
    query[:2] = sequences.query
    out = torch.full_like(query, 7.0)
    sequences.attention(4)(query, sequences.cache[:, 1], sequences.lists([0, 1]), out)
    assert torch.equal(out[2:], torch.full_like(out[2:], 7.0))
    assert torch.equal(out[:2], sequences.run(sequences.attention(), [0, 1]))


def test_a_captured_one_is_run_over_and_over() -> None:
    """Its lists are read anew each time, and it leaves nothing behind that the next one would stumble on."""
    sequences = Sequences(Shape(), [5000, 900, 30])
    attention = sequences.attention()
    query, out = sequences.query.clone(), torch.empty_like(sequences.query)
    lists = torch.zeros(4096, device=CUDA, dtype=torch.int32)

    def fill(rows: list[int]) -> None:
        own = sequences.lists(rows)
        lists[: len(own)] = own

    fill([0, 1, 2])
    attention(query, sequences.cache[:, 0], lists, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        query.add_(0)
        attention(query, sequences.cache[:, 0], lists, out, begins_early=True)
        query.add_(0)
        attention(query, sequences.cache[:, 1], lists, out, begins_early=True)
    for rows in ([0, 1, 2], [2, 1, 0], [1, 1, 1], [0, 1, 2]):
        fill(rows)
        query.copy_(sequences.query[rows])
        for _ in range(3):
            graph.replay()
            found = out.clone()
            assert torch.equal(found, sequences.run(sequences.attention(), rows, 1)), rows


def test_what_cannot_be_compiled_is_named() -> None:
    from cotenant.device.cuda.compiled import CompiledKernel

    with pytest.raises(RuntimeError, match=r"broken does not compile with -arch=sm_\d+ -DA=1: .*error"):
        CompiledKernel('extern "C" __global__ void broken() { A + ; }', "broken", {"A": 1}, 0)
