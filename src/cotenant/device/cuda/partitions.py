"""Green contexts: streams whose work runs on a part of the SMs.

Each partition comes from one split of the device: a group of SMs for the online tenant, and the rest. What is launched
on a partition's stream runs on that stream's SMs; so does a graph that was captured there, whatever stream it is
launched on. To go from one partition to another is to launch on another stream.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from cotenant.core.errors import InvalidInputError
from cotenant.core.plan import Partition
from cotenant.device.cuda.driver import Driver

logger = logging.getLogger(__name__)

ONLINE_PRIORITY, BEST_EFFORT_PRIORITY = -1, 0

_sms_of_lane: dict[int, int] = {}  # by stream


def sms_of_lane(lane: int) -> int | None:
    """How many SMs a stream has. None: all, as far as is known here."""
    return _sms_of_lane.get(lane)


class PartitionStreams(NamedTuple):
    """The streams of the two tenants in one partition."""

    online: torch.cuda.Stream
    best_effort: torch.cuda.Stream


def split_multiprocessors(device: torch.device, online_sms: Iterable[int]) -> dict[Partition, PartitionStreams]:
    """A partition for each number of online SMs, rounded up to what the device can be split by, 8 on Hopper. Those that
    round to the same are one; one that leaves the other tenant nothing, or that the driver refuses while it makes
    others, is left out. They last as long as the process.

    Raises InvalidInputError without ``cuda.bindings``, RuntimeError where the driver or the GPU has no green contexts.
    """
    torch.cuda.synchronize(device)  # the first call makes the context that green contexts belong to
    splitter = _Splitter(Driver(), torch.cuda.current_device() if device.index is None else device.index)
    partitions: dict[Partition, PartitionStreams] = {}
    refusal: RuntimeError | None = None
    for count in sorted(set(online_sms)):
        try:
            group, rest = splitter.split(count)
            if rest is None:
                continue
            partition = Partition(int(group.sm.smCount), int(rest.sm.smCount))
            if partition not in partitions:
                partitions[partition] = PartitionStreams(
                    splitter.stream(group, ONLINE_PRIORITY), splitter.stream(rest, BEST_EFFORT_PRIORITY)
                )
        except RuntimeError as error:
            refusal = error
    if refusal is not None:
        if not partitions:
            raise refusal
        logger.warning("not all partitions of the SMs could be made: %s", refusal)
    return partitions


class Partitions:
    """A device's, by the streams that have their SMs: none where it has no green contexts, which the log says once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._was_told = False
        self.streams: dict[Partition, PartitionStreams] = {}

    def split(self, online_sms: Iterable[int]) -> None:
        """See ``split_multiprocessors``. Where that fails, what there was stays."""
        try:
            self.streams = split_multiprocessors(self._device, online_sms)
        except (InvalidInputError, RuntimeError) as error:
            if not self._was_told:
                logger.warning("no partitions of the SMs on this GPU, its driver or its bindings: %s", error)
            self._was_told = True


class _Splitter:
    """Green contexts of one device. They are never destroyed: streams and captured graphs refer to them."""

    def __init__(self, driver: Driver, index: int) -> None:
        self._driver = driver
        self._device = driver.call("cuDeviceGet", index)
        kind = driver.api.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        self._all = driver.call("cuDeviceGetDevResource", self._device, kind)
        self._index = index
        self.num_sms = int(self._all.sm.smCount)

    def split(self, count: int) -> tuple[Any, Any | None]:
        """At least ``count`` SMs, and at least one, and the others, None if there are none."""
        if count >= self.num_sms:
            return self._all, None
        alignment = getattr(self._all.sm, "smCoscheduledAlignment", 0) or 1  # older bindings do not say
        count = -(-max(1, count) // alignment) * alignment
        groups, num_groups, rest = self._driver.call("cuDevSmResourceSplitByCount", 1, self._all, 0, count)
        if num_groups != 1:
            raise RuntimeError(f"the SMs cannot be split into {count} and the others")
        return groups[0], rest if rest.sm.smCount > 0 else None

    def stream(self, sms: Any, priority: int) -> torch.cuda.Stream:
        driver, api = self._driver, self._driver.api
        description = driver.call("cuDevResourceGenerateDesc", [sms], 1)
        flags = api.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = driver.call("cuGreenCtxCreate", description, self._device, flags)
        stream = driver.call("cuGreenCtxStreamCreate", context, api.CUstream_flags.CU_STREAM_NON_BLOCKING, priority)
        _sms_of_lane[int(stream)] = int(sms.sm.smCount)
        return torch.cuda.ExternalStream(int(stream), device=torch.device("cuda", self._index))
