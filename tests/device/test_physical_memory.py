"""What one arena gives up and another takes, over a driver that only keeps count."""

from __future__ import annotations

import pytest
import torch

from cotenant.device.cuda.physical_memory import PhysicalMemory

MIB = 1 << 20


class Driver:
    """Handles and mappings by number, as strict as CUDA's: a handle that is released twice is an error."""

    def __init__(self) -> None:
        self.references: dict[int, int] = {}  # of each piece of memory
        self.mapped: dict[int, int] = {}  # piece by address
        self.fails_to_unmap = False

    def create(self, size_bytes: int) -> int:
        self.references[len(self.references)] = 1
        return len(self.references) - 1

    def release(self, handle: int) -> None:
        self.references[handle] -= 1
        assert self.references[handle] >= 0

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        assert address not in self.mapped
        self.mapped[address] = handle
        self.references[handle] += 1

    def unmap(self, address: int, size_bytes: int) -> None:
        if self.fails_to_unmap:
            raise RuntimeError("cuMemUnmap failed")
        self.references[self.mapped.pop(address)] -= 1

    @property
    def num_held(self) -> int:
        return sum(count > 0 for count in self.references.values())


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def memory(driver: Driver) -> PhysicalMemory:
    memory = PhysicalMemory(torch.device("cuda"))
    memory._opened = driver  # type: ignore[assignment]
    return memory


def test_what_is_kept_is_taken_by_the_next_and_given_back_piece_by_piece(
    driver: Driver, memory: PhysicalMemory
) -> None:
    for address in range(5):
        memory.map(address, MIB)
    for address in range(5):
        memory.unmap(address, MIB, keep=True)
    assert (driver.num_held, memory.kept_bytes) == (5, 5 * MIB)
    memory.map(10, MIB)
    assert (driver.num_held, memory.kept_bytes) == (5, 4 * MIB)
    assert memory.release(most_bytes=1) == MIB
    assert memory.release(most_bytes=2 * MIB) == 2 * MIB
    assert (driver.num_held, memory.kept_bytes) == (2, MIB)
    assert memory.release() == MIB
    assert memory.release() == 0
    memory.unmap(10, MIB, keep=False)
    assert driver.num_held == 0


def test_pieces_of_another_size_are_not_taken(driver: Driver, memory: PhysicalMemory) -> None:
    memory.map(0, MIB)
    memory.unmap(0, MIB, keep=True)
    memory.map(0, 2 * MIB)
    assert (driver.num_held, memory.kept_bytes) == (2, MIB)


def test_a_mapping_that_cannot_be_undone_holds_its_memory_once(driver: Driver, memory: PhysicalMemory) -> None:
    memory.map(0, MIB)
    driver.fails_to_unmap = True
    with pytest.raises(RuntimeError):
        memory.unmap(0, MIB, keep=True)
    driver.fails_to_unmap = False
    memory.unmap(0, MIB, keep=False)
    assert driver.num_held == 0
