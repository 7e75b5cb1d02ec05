"""Batches for the partitions of the SMs, captured after the start: requests can be served without them."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

import torch

from cotenant.core.errors import InvalidInputError
from cotenant.core.plan import Partition
from cotenant.device import Device
from cotenant.engine.engine import OnlineEngine
from cotenant.runtime.sizing import partition_bytes

logger = logging.getLogger(__name__)

# While requests are live and a job waits for the partitions, one batch size is captured in so many seconds: each takes
# some tens of milliseconds, in which nothing else runs; a tenth of a second where it has prompts, and the last of those
# three, for all are timed then.
_EVERY_S = 0.25


class LaneCaptures:
    """``step`` captures one batch size of one partition, until ``done``. It belongs to the thread that launches.

    ``only_for_jobs``: a server without a job captures nothing. ``refused``: it could not be done, and no partition is
    used.
    """

    def __init__(self, device: Device, engine: OnlineEngine, with_prompts: Collection[Partition] = ()) -> None:
        """``with_prompts``: in these partitions batches have prompts, too."""
        self._device = device
        self._engine = engine
        self._with_prompts = with_prompts
        self._left = list(device.partitions)
        self._next_s = 0.0
        self.only_for_jobs = False
        self.refused = False

    @property
    def done(self) -> bool:
        return not self._left

    @property
    def reserved_bytes(self) -> int:
        """Of the device's free memory, what the captures still need."""
        return sum(partition_bytes(with_prompts=partition in self._with_prompts) for partition in self._left)

    def usable(self, partitions: tuple[Partition, ...]) -> tuple[Partition, ...]:
        """Those that batches may be launched in: none until all are captured."""
        return partitions if self.done and not self.refused else ()

    def is_wanted(self, *, has_job: bool, delays_requests: bool) -> bool:
        """Whether the next step is to be done now. Requests are delayed for a job alone, and not all the time."""
        if self.done or (self.only_for_jobs and not has_job):
            return False
        return not delays_requests or (has_job and time.monotonic() >= self._next_s)

    def step(self) -> None:
        """Batches in flight end first. If it fails the partitions are given up."""
        self._device.synchronize()
        try:
            self._capture()
        except torch.OutOfMemoryError as error:
            if not self._device.release_kept_memory():
                self._refuse(f"there is no memory to share SMs, lower --gpu-memory-utilization for that ({error})")
        except Exception as error:
            self._refuse(f"batches cannot be captured to share SMs: {error}")
        self._device.synchronize()  # raises if the device is of no use any more
        self._next_s = time.monotonic() + _EVERY_S

    def finish(self) -> None:
        """All steps at once. Raises InvalidInputError if they fail."""
        while not self.done:
            self.step()
        if self.refused:
            raise InvalidInputError("the partitions of the SMs cannot be used: the log says why")

    def _capture(self) -> None:
        partition = self._left[0]
        with self._device.online(partition):
            if self._engine.capture_lane(partition.online_sms, with_prompts=partition in self._with_prompts):
                self._left.pop(0)

    def _refuse(self, reason: str) -> None:
        logger.warning("%s", reason)
        self.refused = True
        self._left.clear()
        self._engine.drop_lanes()
