"""The CPU as a device: one lane, work ends when its call returns."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from cotenant.core.plan import Partition
from cotenant.core.tasklet import TaskletShape
from cotenant.device.base import Clocks, FinishedTasklet
from cotenant.device.cpu.arena import CpuArena


class CpuDevice:
    """Leaves one core to the API process and its clients: with all cores taken, tokens wait for the event loop."""

    fuses = False  # one lane anyway: fusing saves little and costs the bits of an undisturbed training run
    overlaps = False
    num_multiprocessors: int | None = None
    clocks: Clocks | None = None
    partitions: tuple[Partition, ...] = ()

    def __init__(self) -> None:
        num_threads = max(1, len(os.sched_getaffinity(0)) - 1)
        torch.set_num_threads(num_threads)
        self.torch_device = torch.device("cpu")
        self.name = f"cpu {platform.machine()} x{num_threads}"
        self._finished: list[FinishedTasklet] = []
        self.num_launched = 0

    def split(self, online_sms: Iterable[int]) -> None:
        return

    @contextmanager
    def online(self, partition: Partition | None = None) -> Iterator[None]:
        yield

    @contextmanager
    def fused(self) -> Iterator[None]:
        yield

    def wait_for_room(
        self, interrupted: Callable[[], bool] | None = None, ask_every_s: float = 1e-3, *, far_ahead: bool = False
    ) -> None:
        return

    def has_room(self, *, far_ahead: bool = False, for_s: float = 0.0) -> bool:
        return True

    def host_was_away(self, seconds: float) -> None:
        return

    def run_tasklet(
        self,
        launch: Callable[[], TaskletShape],
        *,
        behind_online: bool = False,
        partition: Partition | None = None,
    ) -> None:
        start = time.perf_counter()
        shape = launch()
        end = time.perf_counter()
        self.num_launched += 1
        self._finished.append(FinishedTasklet(shape, (end - start) * 1e3, end, partition))

    def num_ended(self) -> int:
        return self.num_launched

    def is_training(self) -> bool:
        return False

    def tasklets_end(self) -> torch.cuda.Event | None:
        return None

    def tasklets_left_ms(self) -> float:
        return 0.0

    def finished_tasklets(self) -> list[FinishedTasklet]:
        finished, self._finished = self._finished, []
        return finished

    def wait_for_tasklets(self) -> None:
        return

    def synchronize(self) -> None:
        return

    def default_dtype(self) -> torch.dtype:
        return torch.float32

    def memory_bytes(self) -> tuple[int, int]:
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page_bytes, os.sysconf("SC_PHYS_PAGES") * page_bytes

    def retire(self, graphs: Iterable[object]) -> None:
        return

    @property
    def has_retired(self) -> bool:
        return False

    def destroy_retired(self, most_s: float = math.inf) -> None:
        return

    def release_kept_memory(self, most_bytes: int | None = None) -> bool:
        return False  # the operating system has it

    def set_aside(self, num_bytes: int) -> bool:
        return True  # the operating system has it

    def create_arena(self, num_bytes: int, chunk_bytes: int) -> CpuArena:
        return CpuArena(num_bytes, chunk_bytes)
