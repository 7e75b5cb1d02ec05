"""The two lanes of a GPU: what waits for what, and whose time is whose."""

from __future__ import annotations

import pytest
import torch

from cotenant.core.tasklet import TaskletKind, TaskletShape
from cotenant.device import create_device

MIB = 1 << 20
SHAPE = TaskletShape(TaskletKind.FORWARD_MLP, 128, 128)


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_tasklet_behind_a_batch_begins_as_that_ends(is_busy: bool) -> None:
    device = create_device("cuda")
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    small = matrix[:1024]
    marker, seen = (torch.zeros(1 << 20, device="cuda") for _ in range(2))

    def tasklet() -> TaskletShape:
        torch.mm(small, matrix)
        seen.copy_(marker)
        return SHAPE

    for _ in range(3):  # makes the library ready
        device.wait_for_room()
        device.run_tasklet(tasklet)
    device.synchronize()
    device.finished_tasklets()
    for turn in range(1, 6):
        if is_busy:
            device.wait_for_room()
            device.run_tasklet(tasklet)
        with device.online():
            for _ in range(20):  # some ten milliseconds
                torch.mm(matrix, matrix)
            marker.fill_(turn)
        device.run_tasklet(tasklet, behind_online=True)
        for _ in range(3):
            device.wait_for_room()
            device.run_tasklet(tasklet)
        device.synchronize()
        assert (seen == turn).all()
    finished = device.finished_tasklets()
    assert len(finished) == 5 * (4 + is_busy)
    assert sorted(tasklet.elapsed_ms for tasklet in finished)[len(finished) // 2] < 2
    ends = [tasklet.end_s for tasklet in finished]
    assert ends == sorted(ends)


def test_memory_that_is_kept_is_free_and_goes_back_piece_by_piece() -> None:
    device = create_device("cuda")
    arena = device.create_arena(1024 * MIB, 128 * MIB)
    torch.cuda.empty_cache()
    before = device.memory_bytes()[0]
    arena.map(range(8))
    assert before - device.memory_bytes()[0] >= 1024 * MIB
    arena.unmap(range(8), keep=True)
    assert abs(before - device.memory_bytes()[0]) < 64 * MIB
    driver_free = torch.cuda.mem_get_info()[0]
    assert device.release_kept_memory(most_bytes=1)
    assert 64 * MIB < torch.cuda.mem_get_info()[0] - driver_free < 192 * MIB
    assert device.release_kept_memory()
    assert not device.release_kept_memory()
