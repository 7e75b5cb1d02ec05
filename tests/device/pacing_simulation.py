"""A device and a host that run tasklets in simulated time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from cotenant.core.plan import Partition
from cotenant.core.tasklet import TaskletKind, TaskletShape
from cotenant.device.cuda import pacing

FORWARD = TaskletShape(TaskletKind.FORWARD_MLP, 2048, 2048)
BACKWARD = TaskletShape(TaskletKind.BACKWARD_UP, 2048, 2048)


class Simulation:
    """A host and a stream on one clock. A sleep takes longer than it was told to, a launch some time of the host's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.busy_until_s = 0.0
        self.num_sleeps = 0
        self.num_questions = 0
        self.oversleeps: Iterator[float] = itertools.repeat(50e-6)
        self.drift = 0.0  # by how much of the time the device's clock runs faster than the host's
        simulation = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at_s = 0.0

            def record(self, stream: object) -> None:
                self.at_s = max(simulation.busy_until_s, simulation.now_s)

            def query(self) -> bool:
                simulation.num_questions += 1
                return self.at_s <= simulation.now_s

            def elapsed_time(self, other: Event) -> float:
                simulation.num_questions += 1
                return (other.at_s - self.at_s) * 1e3 * (1.0 + simulation.drift)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(pacing, "time", SimpleNamespace(perf_counter=lambda: self.now_s, sleep=self._sleep))
        self.queue = pacing.TaskletQueue(self)  # type: ignore[arg-type]

    def wait_stream(self, other: SimpleNamespace) -> None:
        """As the stream itself: what is launched from now on begins after the other stream's work."""
        self.busy_until_s = max(self.busy_until_s, other.busy_until_s)

    def _sleep(self, seconds: float) -> None:
        self.num_sleeps += 1
        self.now_s += seconds + next(self.oversleeps)

    def launch(
        self,
        shape: TaskletShape,
        device_s: float,
        host_s: float = 60e-6,
        behind: SimpleNamespace | None = None,
        partition: Partition | None = None,
        waits_for_others: bool = False,
        is_trial: bool = False,
    ) -> None:
        def run() -> TaskletShape:
            if is_trial:
                pacing.note_trial()
            self.now_s += host_s
            self.busy_until_s = max(self.busy_until_s, self.now_s) + device_s
            return shape

        self.queue.launch(run, self, partition, behind, waits_for_others=waits_for_others)  # type: ignore[arg-type]

    def run(
        self,
        shape: TaskletShape,
        device_s: float,
        count: int,
        partition: Partition | None = None,
        host_s: float = 60e-6,
    ) -> list[float]:
        """So many tasklets; how long before the end of the one in flight each was launched (negative: after it)."""
        leads_s = []
        for _ in range(count):
            self.queue.wait_for_room()
            leads_s.append(self.busy_until_s - self.now_s)
            self.launch(shape, device_s, host_s, partition=partition)
        return leads_s
