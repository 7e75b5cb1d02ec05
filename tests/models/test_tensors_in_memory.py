"""Tensors of a file in safetensors are what safetensors itself reads, and what is no such file is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save, save_file

from cotenant.models.tensors_in_memory import read_tensors

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
SHAPES = st.lists(st.integers(0, 5), max_size=3)


def _random(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def _is_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(tensor.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


@settings(deadline=None)
@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=6), st.booleans())
def test_they_are_what_safetensors_reads(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[list[int], torch.dtype]], has_metadata: bool
) -> None:
    tensors = {f"tensor-{seed}": _random(shape, dtype, seed) for seed, (shape, dtype) in enumerate(kinds)}
    path = tmp_path_factory.mktemp("tensors") / "file.safetensors"
    save_file(tensors, path, metadata={"format": "pt"} if has_metadata else None)
    found, expected = read_tensors(path), load(path.read_bytes())
    assert found.keys() == expected.keys()
    assert all(_is_same(found[name], tensor) for name, tensor in expected.items())


def test_they_stay_what_they_were_when_the_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    save_file({"a": torch.arange(1000)}, path)
    found = read_tensors(path)
    path.write_bytes(b"")
    found["a"] += 1
    assert torch.equal(found["a"], torch.arange(1000) + 1)


def test_they_may_lie_at_odd_places(tmp_path: Path) -> None:
    """The writers that there are align the header; the format does not ask for it."""
    content = save({"a": torch.arange(10), "b": torch.ones(3, dtype=torch.bfloat16)})
    num_bytes = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + num_bytes].rstrip() + b" "
    header += b" " * ((len(header) + 1) % 2)
    path = tmp_path / "file.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + num_bytes :])
    found = read_tensors(path)
    assert len(header) % 8
    assert torch.equal(found["a"], torch.arange(10))
    assert torch.equal(found["b"], torch.ones(3, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "F4"}, "a is stored as F4"),
        ({"shape": [3]}, "does not lie in the bytes"),
        ({"shape": [-2, -2]}, "sizes or offsets that are none"),
        ({"shape": [4.0]}, "sizes or offsets that are none"),
        ({"shape": [True, 4]}, "sizes or offsets that are none"),
        ({"shape": ["4"]}, "sizes or offsets that are none"),
        ({"shape": [0, 1 << 70], "data_offsets": [0, 0]}, "sizes or offsets that are none"),
        ({"shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]}, "b does not begin where"),
        ({"data_offsets": [-4, 12]}, "sizes or offsets that are none"),
        ({"data_offsets": [0, 16.2]}, "sizes or offsets that are none"),
        ({"data_offsets": [0, 32]}, "b does not begin where"),
        ({"data_offsets": [0, 12], "shape": [3]}, "b does not begin where"),
        ({"data_offsets": [16, 0]}, "does not begin where"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    tensors = {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changes}
    header = json.dumps(tensors | {"b": {"dtype": "U8", "shape": [4], "data_offsets": [16, 20]}}).encode()
    path = tmp_path / "file.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(20))
    with pytest.raises(ValueError, match=words):
        read_tensors(path)
