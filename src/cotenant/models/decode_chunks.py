"""How the attention of a decode step is cut: each sequence's tokens into chunks, of each of which
``kernels/decode_attention.cu`` takes one key head at a time.

A sequence is cut by its own length and by how many there are, not by the SMs that there are: on however many, what it
attends to has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]

TILE_TOKENS = 16  # that the kernel takes at once
FIELDS = 8  # integers of each chunk
MOST_PARTS = 16  # that a sequence is cut into
MOST_HEADS = 8  # of a key head's queries at once
# Of a chunk that is not a sequence's last, by how many units there were if no sequence were cut. They are long, for
# each is added up at its end, unless most SMs would have nothing to do: `bench/decode_attention.py --chunk-tokens`.
_LEAST_TOKENS = ((8, 256), (32, 512))
_USUAL_TOKENS = 1024


def num_units(num_heads: int, num_kv_heads: int) -> int:
    """Of each chunk: key heads, times how often each is read for its queries."""
    return num_kv_heads * -(-num_heads // num_kv_heads // MOST_HEADS)


@cache
def num_chunks(num_sequences: int, max_model_len: int, units: int) -> int:
    """The most that so many sequences, or fewer, can have."""
    numbers = {num_sequences, *(min(num_sequences, most // units) for most, _ in _LEAST_TOKENS)}
    return max(number * min(MOST_PARTS, -(-max_model_len // _least_tokens(number * units))) for number in numbers)


def _least_tokens(num_units: int) -> int:
    return next((tokens for most, tokens in _LEAST_TOKENS if num_units <= most), _USUAL_TOKENS)


def cut(indptr: Int32Array, contexts: Sequence[int], window: int | None, units: int) -> Int32Array:
    """The chunks of sequences with these contexts, each of which attends to its last ``window`` tokens at most. The
    first integer is how many there are, from the ninth on come their fields, ``FIELDS`` each: the sequence, the chunk's
    first token, the one after its last, where the sequence's pages begin, which of its sequence's chunks it is and of
    how many, how many chunks come in the sequences before, and the sequence's length. Pages are expected behind the
    chunks, one list after the other, and counted from the first integer; ``indptr`` [sequences + 1] counts them from
    the first list. ``units``: of each chunk.

    The largest chunks come first: who has taken the last of them takes less of the small ones.
    """
    num_sequences = len(contexts)
    of_sequences = np.zeros((num_sequences, FIELDS), dtype=np.int32)  # what their chunks share
    row, begin, size, pages, _, parts, before, length = of_sequences.T
    row[:], pages[:], length[:] = np.arange(num_sequences), indptr[:-1], contexts
    if window is not None:
        begin[:] = np.maximum(length - window, 0) // TILE_TOKENS * TILE_TOKENS
    spans = length - begin
    size[:] = _least_tokens(num_sequences * units)
    while (too_many := spans > size * MOST_PARTS).any():
        size[too_many] *= 2
    parts[:] = -(-spans // size)
    before[1:] = parts[:-1].cumsum()
    of_chunks = of_sequences.repeat(parts, axis=0)
    _, begin, size, pages, part, _, before, length = of_chunks.T
    part[:] = np.arange(len(of_chunks)) - before
    begin += part * size
    end = np.minimum(begin + size, length, out=size)  # whose place it has
    chunks = np.zeros((1 + len(of_chunks), FIELDS), dtype=np.int32)
    chunks[0, 0] = len(of_chunks)
    pages += chunks.size
    order = (begin - end).argsort(kind="stable")
    of_chunks.take(order, axis=0, out=chunks[1:], mode="clip")  # the usual mode has it copied once more
    return chunks.ravel()
