"""The CPU's arena: content stays while it is mapped, memory goes back when it is not, addresses never change."""

from __future__ import annotations

import gc
import mmap
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.device import create_device
from cotenant.device.arena import Arena, chunk_granularity, runs

PAGE_BYTES = chunk_granularity(torch.device("cpu"))
MIB = 1 << 20


def create_arena(num_chunks: int, chunk_bytes: int = PAGE_BYTES) -> Arena:
    return create_device("cpu").create_arena(num_chunks * chunk_bytes, chunk_bytes)


def resident_bytes(arena: Arena) -> int:
    """Of the mappings that the arena lies in: what other pages of the process do changes nothing."""
    begin = arena.tensor(torch.uint8).data_ptr()
    end = begin + arena.num_chunks * arena.chunk_bytes
    found, is_there = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        range_of = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if range_of is not None:
            is_there = int(range_of[1], 16) < end and begin < int(range_of[2], 16)
        elif is_there and line.startswith("Rss:"):
            found += int(line.split()[1]) << 10
    return found


def test_content_stays_and_what_comes_back_is_zero() -> None:
    arena = create_arena(4)
    arena.map([0, 2, 3])
    assert arena.mapped == {0, 2, 3}
    chunks = arena.tensor(torch.int64).view(4, -1)
    address = chunks.data_ptr()
    assert not chunks[[0, 2, 3]].any()
    for chunk in (0, 2, 3):
        chunks[chunk] = chunk + 1
    arena.unmap([2])
    arena.map([1, 2])
    assert arena.mapped == {0, 1, 2, 3}
    assert chunks[:, 0].tolist() == [1, 0, 0, 4]
    assert (chunks == chunks[:, :1]).all()
    assert arena.tensor(torch.int64).data_ptr() == address


def test_one_memory_under_every_dtype() -> None:
    arena = create_arena(2)
    arena.map([0, 1])
    halves, words = arena.tensor(torch.bfloat16), arena.tensor(torch.int64)
    assert (halves.numel(), words.numel()) == (PAGE_BYTES, PAGE_BYTES // 4)
    halves[:4] = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16)
    assert words[0].item() == halves[:4].view(torch.int64).item() != 0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone takes memory back from a mapping that stays")
def test_memory_goes_back_to_the_operating_system() -> None:
    arena = create_arena(8, 8 * MIB)
    arena.map(range(8))
    before = resident_bytes(arena)
    arena.tensor(torch.uint8).fill_(1)
    assert resident_bytes(arena) - before > 60 * MIB
    arena.unmap([1, 2, 3, 6])
    assert 28 * MIB < resident_bytes(arena) - before < 36 * MIB
    arena.close()
    assert arena.mapped == frozenset()
    assert resident_bytes(arena) - before < 4 * MIB


def test_a_tensor_outlives_its_arena() -> None:
    arena = create_arena(2, MIB)
    arena.map([0, 1])
    tensor = arena.tensor(torch.uint8)
    tensor.fill_(7)
    del arena
    gc.collect()
    assert (tensor == 7).all()


def test_what_is_mapped_is_not_mapped_again() -> None:
    arena = create_arena(3)
    arena.map([1])
    with pytest.raises(AssertionError, match=r"\[1\] are mapped already"):
        arena.map([0, 1])
    with pytest.raises(AssertionError, match=r"\[0\] are not mapped"):
        arena.unmap([0, 1])
    with pytest.raises(AssertionError, match="outside 0 to 2"):
        arena.map([3])
    assert arena.mapped == {1}


def test_sizes() -> None:
    device = create_device("cpu")
    assert device.create_arena(3 * PAGE_BYTES + 1, PAGE_BYTES).num_chunks == 4
    assert device.create_arena(1, 2 * PAGE_BYTES).tensor(torch.uint8).numel() == 2 * PAGE_BYTES
    with pytest.raises(ValueError, match=f"multiple of {mmap.PAGESIZE}"):
        device.create_arena(PAGE_BYTES, PAGE_BYTES // 2)
    with pytest.raises(ValueError, match="at least 1 byte"):
        device.create_arena(0, PAGE_BYTES)
    with pytest.raises(torch.OutOfMemoryError, match="cannot reserve"):
        device.create_arena(1 << 60, 1 << 40)


@settings(max_examples=100, deadline=None)
@given(chunks=st.sets(st.integers(0, 20)))
def test_runs_are_the_fewest_ranges(chunks: set[int]) -> None:
    found = runs(chunks)
    assert [chunk for run in found for chunk in run] == sorted(chunks)
    assert all(before.stop < after.start for before, after in pairwise(found))
