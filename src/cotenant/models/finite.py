"""Whether the tensors of a file in safetensors are finite. No torch: it takes several passes and memory for each."""

from __future__ import annotations

from itertools import groupby
from mmap import mmap
from typing import Any

import numpy as np

from cotenant.models.safetensors_file import Header

# By the format's names: whole numbers of the same width, and the bits that are all set in what is no finite number.
_EXPONENTS: dict[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "F8_E4M3": (np.uint8, 0x7F),  # which has no infinity
    "F8_E5M2": (np.uint8, 0x7C),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
    "F32": (np.uint32, 0x7F800000),
    "F64": (np.uint64, 0x7FF0000000000000),
}
_BLOCK_BYTES = 1 << 20  # stays in a core's cache between the two passes


def first_not_finite(content: mmap, header: Header) -> str | None:
    """The name of a tensor that holds NaN or infinity, if there is one. Other threads run meanwhile."""
    # Tensors that lie side by side are looked at as one: the fewer calls, the sooner others have the interpreter.
    in_order = sorted(header.spans.items(), key=lambda item: item[1])
    for dtype, run in groupby(in_order, key=lambda item: header.dtypes[item[0]]):
        spans = list(run)
        position = _first_in(content, len(header.raw), dtype, spans[0][1][0], spans[-1][1][1])
        if position is not None:
            return next(name for name, (_, end) in spans if position < end)
    return None


def _first_in(content: mmap, offset: int, dtype: str, begin: int, end: int) -> int | None:
    """Where the first such number begins between two positions behind ``offset``."""
    if dtype not in _EXPONENTS or begin == end:
        return None
    kind, bits = _EXPONENTS[dtype]
    exponent = kind(bits)
    values = np.frombuffer(content, kind, (end - begin) // exponent.itemsize, offset + begin)
    scratch = np.empty(_BLOCK_BYTES // exponent.itemsize, kind)
    for start in range(0, len(values), len(scratch)):
        part = values[start : start + len(scratch)]
        found = np.bitwise_and(part, exponent, out=scratch[: len(part)])
        if found.max() == exponent:
            return begin + (start + int(found.argmax())) * exponent.itemsize
    return None
