"""A safetensors file's tensors where its content lies: nothing is copied, and no other thread waits. safetensors' own
``load`` copies all of it and keeps the interpreter meanwhile, which would stop the loop."""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import torch

from cotenant.host_memory import allocate
from cotenant.models.safetensors_file import Header, read_header, read_whole

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All of a file, which may be replaced afterwards. Raises ValueError for what is no such file, OSError."""
    with path.open("rb") as file:
        header = read_header(file)
        return tensors_in(read_whole(file, header), header)


def tensors_in(content: mmap.mmap, header: Header) -> dict[str, torch.Tensor]:
    """By name; they share ``content``, which lives as long as any of them. Raises ValueError if they do not lie there
    as the header says."""
    return {name: _tensor(content, header, name) for name in header.spans}


def _tensor(content: mmap.mmap, header: Header, name: str) -> torch.Tensor:
    dtype = _DTYPES.get(header.dtypes[name])
    if dtype is None:
        raise ValueError(f"{name} is stored as {header.dtypes[name]}; known are {', '.join(_DTYPES)}")
    shape, (begin, end) = header.shapes[name], header.spans[name]
    size = math.prod(shape)
    if end - begin != size * dtype.itemsize:
        raise ValueError(f"{name} of shape {list(shape)} does not lie in the bytes {begin} to {end}")
    if size == 0:
        try:
            return torch.empty(shape, dtype=dtype)
        except RuntimeError as error:  # sizes that are too large for it
            raise ValueError(f"{name} cannot have the shape {list(shape)}: {error}") from error
    begin += len(header.raw)
    if begin % dtype.itemsize:  # as no writer leaves it
        content, begin = _moved(content, begin, size * dtype.itemsize), 0
    return torch.frombuffer(content, dtype=dtype, count=size, offset=begin).view(shape)


def _moved(content: mmap.mmap, begin: int, num_bytes: int) -> mmap.mmap:
    moved = allocate(num_bytes)
    moved[:] = content[begin : begin + num_bytes]
    return moved
