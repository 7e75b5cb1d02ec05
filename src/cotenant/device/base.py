"""What the worker asks of a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from cotenant.core.plan import Partition
from cotenant.core.tasklet import TaskletShape
from cotenant.device.arena import Arena


class FinishedTasklet(NamedTuple):
    """A tasklet whose work has ended on the device, how long it took there, and when it ended, on the host's
    time.perf_counter. ``partition``: whose best-effort SMs it had; None: all SMs."""

    shape: TaskletShape
    elapsed_ms: float
    end_s: float
    partition: Partition | None = None


class Clocks(NamedTuple):
    """A GPU's highest: ``sm_hz`` of each SM, ``bytes_per_s`` of its memory. ``capability``: what its SMs can do."""

    capability: tuple[int, int]
    sm_hz: float
    bytes_per_s: float


class Device(Protocol):
    """Two lanes of work, online and best-effort. On a device that cannot overlap them they are the same lane.

    ``name`` identifies the hardware in latency records. ``fuses``: running a training forward inside a decode step is
    expected to pay. ``overlaps``: launched work runs while the host goes on, so batches are launched ahead of it.
    ``num_multiprocessors``: of a GPU, that tiles of a matrix product are dealt out to; None elsewhere.
    ``clocks``: None where nobody tells them.
    ``partitions``: of its SMs, that were made so far. ``num_launched``: tasklets so far, without the one that is being
    launched.
    """

    name: str
    torch_device: torch.device
    fuses: bool
    overlaps: bool
    num_multiprocessors: int | None
    clocks: Clocks | None
    partitions: tuple[Partition, ...]

    @property
    def num_launched(self) -> int: ...

    def split(self, online_sms: Iterable[int]) -> None:
        """Make partitions with so many SMs for the online tenant, or the next number that the device can do. Where it
        has none, ``partitions`` stays empty, which the log says. Called once, at the start."""

    def online(self, partition: Partition | None = None) -> AbstractContextManager[None]:
        """What is launched inside belongs to the online tenant, and has the partition's SMs for it; None: all."""

    def fused(self) -> AbstractContextManager[None]:
        """What is launched inside belongs to both tenants and is ordered after both lanes' earlier work."""

    def wait_for_room(
        self, interrupted: Callable[[], bool] | None = None, ask_every_s: float = 1e-3, *, far_ahead: bool = False
    ) -> None:
        """Wait until the best-effort lane is idle, or so nearly that the next tasklet is to be launched now; or until
        ``interrupted``, asked meanwhile, says yes. ``far_ahead``: several tasklets may be in flight, so that the lane
        has work while the host is busy elsewhere, for as long as it was before (``host_was_away``)."""

    def has_room(self, *, far_ahead: bool = False, for_s: float = 0.0) -> bool:
        """Whether ``wait_for_room`` would return at once; or what is in flight lasts for less than ``for_s``."""

    def host_was_away(self, seconds: float) -> None:
        """So long after the last tasklet of an iteration the next one's batch was launched."""

    def run_tasklet(
        self,
        launch: Callable[[], TaskletShape],
        *,
        behind_online: bool = False,
        partition: Partition | None = None,
    ) -> None:
        """Launch one tasklet on the best-effort lane, outside of the other lane. ``wait_for_room`` or ``has_room`` says
        when; with ``behind_online`` it is always time.
        ``behind_online``: it begins when what was launched on the online lane has ended; nothing is waited for.
        ``partition``: it runs on the SMs that this has for it; None: on all."""

    def num_ended(self) -> int:
        """Of the ``num_launched`` tasklets, how many are over; they end in order."""

    def is_training(self) -> bool:
        """Whether a tasklet is in flight."""

    def tasklets_end(self) -> torch.cuda.Event | None:
        """When the tasklets that are in flight on all SMs will have ended, by the device's clock; None: none is, or no
        event would tell."""

    def tasklets_left_ms(self) -> float:
        """How long that is from now, as far as is known; 0 if none is."""

    def finished_tasklets(self) -> list[FinishedTasklet]:
        """The tasklets that ended since the last call, in order; without those whose time was the host's, which was
        making them ready for the first time."""

    def wait_for_tasklets(self) -> None:
        """Wait until the best-effort lane is idle."""

    def synchronize(self) -> None:
        """Wait until both lanes are idle."""

    def default_dtype(self) -> torch.dtype:
        """The dtype for `--dtype auto` when the checkpoint names none that the device is fast at."""

    def memory_bytes(self) -> tuple[int, int]:
        """(free, total) bytes of the memory that tensors live in; what torch keeps unused for later tensors, and arenas
        for one another, is free."""

    def release_kept_memory(self, most_bytes: int | None = None) -> bool:
        """Give back the memory that arenas have kept for one another, and say whether there was any. It takes a
        millisecond or more per GiB: ``most_bytes``, but at least one piece, are given back at a time; None: all. An
        arena that finds no memory gives it back itself."""

    def retire(self, graphs: Iterable[object]) -> None:
        """Let go of captured graphs that nobody launches again, little by little: some thousands at once would keep
        requests waiting for longer than a step. They hold their memory until then."""

    @property
    def has_retired(self) -> bool:
        """Whether something that was retired is left."""

    def destroy_retired(self, most_s: float = math.inf) -> None:
        """Let go of what was retired for so long at most."""

    def set_aside(self, num_bytes: int) -> bool:
        """Have torch keep so many bytes for what batches that have all SMs need while they run: so none of them waits
        for the device's memory. False if there are not so many, or torch's allocator cannot be made to keep them.
        ``memory_bytes`` counts what is unused of them as free. Called once, with nothing in flight."""

    def create_arena(self, num_bytes: int, chunk_bytes: int) -> Arena:
        """Addresses for ``num_bytes``, rounded up to whole chunks, with no memory under them yet.

        ``chunk_bytes`` is a multiple of ``cotenant.device.arena.chunk_granularity``, or ValueError.
        """
