"""Memory that threads beside the loop use for large tensors."""

from __future__ import annotations

import pytest
import torch

from cotenant.device.transfer import host_tensor, to_device, to_host
from cotenant.host_memory import allocate


def test_it_is_zeros_that_can_be_written() -> None:
    memory = allocate(5 << 20)
    assert memory[:] == bytes(5 << 20)
    memory[-3:] = b"end"
    assert memory[-4:] == b"\0end"


def test_a_tensor_keeps_its_memory() -> None:
    tensor = host_tensor((3, 1 << 20), torch.bfloat16)
    assert (tensor.shape, tensor.dtype, int(tensor.count_nonzero())) == ((3, 1 << 20), torch.bfloat16, 0)
    row = tensor[2].fill_(1)
    del tensor
    assert int(row.sum(dtype=torch.int64)) == 1 << 20
    assert host_tensor((0, 4), torch.float32).shape == (0, 4)


def test_copies_are_of_their_own() -> None:
    tensor = torch.arange(12.0, requires_grad=True)
    copy = to_host(tensor)
    assert torch.equal(copy, torch.arange(12.0))
    assert not copy.requires_grad
    copy += 1
    assert torch.equal(tensor.detach(), torch.arange(12.0))


def test_what_is_there_already_is_not_copied() -> None:
    tensors = {"a": torch.ones(2), "b": torch.zeros(3, dtype=torch.int64)}
    assert {name: id(tensor) for name, tensor in to_device(tensors, torch.device("cpu")).items()} == {
        name: id(tensor) for name, tensor in tensors.items()
    }


def test_what_there_is_no_memory_for_is_a_memory_error() -> None:
    """Not one of the disk: a checkpoint that cannot be read for lack of memory is a good one all the same."""
    with pytest.raises(MemoryError, match="no memory for"):
        allocate(1 << 62)
