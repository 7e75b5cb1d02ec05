"""Files in safetensors that others may change meanwhile: read, not mapped. Who reads a mapped file that is cut short is
killed by SIGBUS. No torch."""

from __future__ import annotations

import json
import mmap
from collections import Counter
from io import BufferedReader
from typing import Any, BinaryIO, NamedTuple, cast

from cotenant.host_memory import allocate

LENGTH_BYTES = 8
_MOST = (1 << 63) - 1  # of a size or an offset
_MAX_HEADER_BYTES = 100_000_000  # as the format has it


class Header(NamedTuple):
    """``raw``: as it stands in the file, with its length before it. ``dtypes``: by their names there. ``spans``: where
    tensors begin and end behind it. ``size_bytes``: of the whole file."""

    raw: bytes
    dtypes: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    spans: dict[str, tuple[int, int]]
    size_bytes: int


def read_header(file: BinaryIO) -> Header:
    """From the beginning of a file. Raises ValueError for what is no header, or for a file that is shorter than its
    header says; OSError."""
    raw = _read(file, LENGTH_BYTES)
    num_bytes = int.from_bytes(raw, "little")
    if num_bytes > _MAX_HEADER_BYTES:
        raise ValueError("its header is too long")
    raw += _read(file, num_bytes)
    try:
        entries = json.loads(raw[LENGTH_BYTES:].decode(), object_pairs_hook=without_repetition)
        tensors = {name: entry for name, entry in entries.items() if name != "__metadata__"}
        dtypes = {name: str(tensor["dtype"]) for name, tensor in tensors.items()}
        shapes = {name: tuple(tensor["shape"]) for name, tensor in tensors.items()}
        offsets = {name: tensor["data_offsets"] for name, tensor in tensors.items()}
        spans = {name: (int(begin), int(end)) for name, (begin, end) in offsets.items()}
    except (ValueError, KeyError, IndexError, AttributeError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"its header is not one of tensors ({error!r:.200})") from error
    numbers = (number for name in tensors for number in (*shapes[name], *offsets[name]))
    if not all(type(number) is int and 0 <= number <= _MOST for number in numbers):
        raise ValueError("its header has sizes or offsets that are none")
    _check_spans(spans)
    size_bytes = len(raw) + max((end for _, end in spans.values()), default=0)
    _check_size(file.seek(0, 2), size_bytes)
    return Header(raw, dtypes, shapes, spans, size_bytes)


def read_whole(file: BinaryIO, header: Header) -> mmap.mmap:
    """All of a file whose header was read, in memory of its own, into which the system reads while other threads run.
    Raises ValueError if it has changed since, OSError."""
    content = allocate(header.size_bytes)
    num_read, left = 0, memoryview(content)
    file.seek(0)
    while left and (count := cast(BufferedReader, file).readinto(left)):
        num_read += count
        left = left[count:]
    _check_size(num_read + len(file.read(1)), header.size_bytes)
    if content[: len(header.raw)] != header.raw:
        raise ValueError("it has changed while it was read")
    return content


def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads, which of equal keys would take the last: raise ValueError instead."""
    if len(fields := dict(pairs)) < len(pairs):
        name, count = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"it names {name} {count} times")
    return fields


def _read(file: BinaryIO, num_bytes: int) -> bytes:
    part = file.read(num_bytes)
    if len(part) < num_bytes:
        raise ValueError("it is cut short: it ends within its header")
    return part


def _check_spans(spans: dict[str, tuple[int, int]]) -> None:
    """One tensor follows another, as the format has it: without overlaps and without holes."""
    stop = 0
    for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        if begin != stop or end < begin:
            raise ValueError(f"{name} does not begin where the tensor before it ends")
        stop = end


def _check_size(size_bytes: int, wanted_bytes: int) -> None:
    if size_bytes < wanted_bytes:
        raise ValueError(f"it is cut short: it holds {size_bytes} of the {wanted_bytes} bytes that its header names")
    if size_bytes > wanted_bytes:
        raise ValueError("it holds more than its header names")
