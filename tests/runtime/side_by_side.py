"""Batches and tasklets side by side.

The lanes are those of a CPU that notes what it is asked for; a batch has not landed for as many looks as a test says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cotenant.core.plan import IterationRecord, Mode, Partition, Plan
from cotenant.core.tasklet import TaskletShape
from cotenant.device.cpu.device import CpuDevice
from runtime.cotenancy import request
from runtime.executor_bench import Bench

FEW, MANY = Partition(48, 84), Partition(96, 36)
NUM_TOKENS = 24


class SplitDevice(CpuDevice):
    overlaps = True
    partitions = (FEW, MANY)

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[str] = []
        self.far_ahead: list[bool] = []
        self.for_s: list[float] = []
        self.trains = False
        self.absences_s: list[float] = []
        self.rooms: Iterator[bool] | None = None  # what it says of room; None: there is always some

    def host_was_away(self, seconds: float) -> None:
        self.absences_s.append(seconds)

    def is_training(self) -> bool:
        return self.trains

    def wait_for_room(
        self, interrupted: Callable[[], bool] | None = None, ask_every_s: float = 1e-3, *, far_ahead: bool = False
    ) -> None:
        self.far_ahead.append(far_ahead)

    def has_room(self, *, far_ahead: bool = False, for_s: float = 0.0) -> bool:
        self.far_ahead.append(far_ahead)
        self.for_s.append(for_s)
        return self.rooms is None or next(self.rooms, False)

    @contextmanager
    def online(self, partition: Partition | None = None) -> Iterator[None]:
        self._note("online", partition)
        yield

    def run_tasklet(
        self, launch: Callable[[], TaskletShape], *, behind_online: bool = False, partition: Partition | None = None
    ) -> None:
        self._note("behind" if behind_online else "tasklet", partition)
        super().run_tasklet(launch, behind_online=behind_online, partition=partition)

    def _note(self, what: str, partition: Partition | None) -> None:
        self.launched.append(what if partition is None else f"{what} {partition.online_sms}")


class SideBySide(Bench):
    def __init__(self, folder: Path) -> None:
        self.device = SplitDevice()
        super().__init__(folder, self.device)
        self.engine.add(request("r", [5, 6, 7], NUM_TOKENS))
        self.execute(Plan())  # its prompt
        self.execute(Plan(num_tasklets=1, mode=Mode.TEMPORAL))
        self.finish()  # nothing is in flight

    def finish(self) -> IterationRecord:
        plan = self.executor.begun
        assert plan is not None
        return self.execute(plan)

    def execute(self, plan: Plan, interrupted: Callable[[], bool] = lambda: False) -> IterationRecord:
        self.device.launched.clear()
        self.device.far_ahead.clear()
        return self.executor.execute(plan, self.emitted.extend, interrupted)


def spatial(num_beside: int, num_behind: int = 0, partition: Partition = FEW) -> Plan:
    return Plan(num_tasklets=num_beside + num_behind, num_beside=num_beside, partition=partition, mode=Mode.SPATIAL)


def count(runs: tuple) -> int:  # type: ignore[type-arg]
    return sum(run.count for run, _ in runs)
