"""How sequences are cut for the attention of decode steps."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cotenant.models.decode_chunks import FIELDS, MOST_PARTS, TILE_TOKENS, cut, num_chunks

PAGE_TOKENS = 16
UNITS = st.integers(1, 40)
LENGTHS = st.lists(st.integers(1, 70_000), min_size=1, max_size=20)


def _cut(lengths: list[int], window: int | None, units: int) -> tuple[np.ndarray, np.ndarray]:
    pages = [-(-length // PAGE_TOKENS) for length in lengths]
    indptr = np.array([0, *itertools.accumulate(pages)], dtype=np.int32)
    chunks = cut(indptr, lengths, window, units)
    assert chunks.dtype == np.int32
    assert len(chunks) == FIELDS * (1 + chunks[0])
    return chunks[FIELDS:].reshape(-1, FIELDS), indptr + len(chunks)


@given(LENGTHS, st.none() | st.integers(1, 5000), UNITS, st.integers(0, 9))
def test_chunks_are_all_that_a_sequence_sees(lengths: list[int], window: int | None, units: int, others: int) -> None:
    chunks, pages = _cut(lengths, window, units)
    assert len(chunks) <= num_chunks(len(lengths) + others, max(lengths), units)
    before = 0
    for row, length in enumerate(lengths):
        mine = sorted(map(list, chunks[chunks[:, 0] == row]), key=lambda chunk: chunk[4])
        begins, ends = [chunk[1] for chunk in mine], [chunk[2] for chunk in mine]
        first = 0 if window is None else max(0, length - window)
        assert begins[0] <= first < begins[0] + TILE_TOKENS
        assert begins == [begins[0], *ends[:-1]]
        assert ends[-1] == length
        assert all(begin % TILE_TOKENS == 0 for begin in begins)
        assert all(end > max(begin, first) for begin, end in zip(begins, ends, strict=True))
        assert len(mine) <= MOST_PARTS
        for part, chunk in enumerate(mine):
            assert chunk[3:] == [pages[row], part, len(mine), before, length]
        before += len(mine)
    sizes = chunks[:, 2] - chunks[:, 1]
    assert (np.diff(sizes) <= 0).all(), "the largest first"


@given(LENGTHS, st.none() | st.integers(1, 5000), UNITS)
def test_how_long_others_are_does_not_decide_how_a_sequence_is_cut(
    lengths: list[int], window: int | None, units: int
) -> None:
    together, _ = _cut(lengths, window, units)
    alone, _ = _cut([lengths[0], *(1 for _ in lengths[1:])], window, units)
    alone = alone[alone[:, 0] == 0]
    assert sorted(map(tuple, together[together[:, 0] == 0][:, [1, 2, 4, 5, 7]])) == sorted(
        map(tuple, alone[:, [1, 2, 4, 5, 7]])
    )
