"""``metrics.jsonl``: one step's metrics a line, in step order, appended to as the job goes on."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from cotenant.core.job import StepMetrics
from cotenant.durable import fsync_path, write_atomically

logger = logging.getLogger(__name__)


class MetricsLog:
    """The metrics file of a job. A torn last line, left by a crash, is never read as a step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[StepMetrics]:
        """The steps from 1 on, up to the first line that is missing or unreadable."""
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        steps: list[StepMetrics] = []
        for line in lines:
            try:
                metrics = msgspec.json.decode(line, type=StepMetrics)
            except msgspec.DecodeError:
                break
            if metrics.step != len(steps) + 1:
                break
            steps.append(metrics)
        if len(steps) < len(lines):
            logger.warning("%s: %d lines after step %d are not used", self.path, len(lines) - len(steps), len(steps))
        return steps

    def keep(self, num_steps: int) -> list[StepMetrics]:
        """Drop everything after ``num_steps`` steps, in one atomic write, and return what is left. A folder that is not
        there is not made: its job may have been cancelled and deleted meanwhile."""
        steps = self.read()[:num_steps]
        content = b"".join(_line(metrics) for metrics in steps)

        def write(temporary: Path) -> None:
            temporary.write_bytes(content)

        write_atomically(self.path, write, make_folder=False)
        return steps

    def append(self, metrics: StepMetrics) -> None:
        """Add a step, not yet for certain on the disk."""
        with self.path.open("ab") as file:
            file.write(_line(metrics))

    def sync(self) -> None:
        """Return once all that was appended is on the disk."""
        fsync_path(self.path)


def _line(metrics: StepMetrics) -> bytes:
    return msgspec.json.encode(metrics) + b"\n"
