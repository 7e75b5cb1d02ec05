"""Tasklets beside a batch and behind it: which of them are launched, and when."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from cotenant.core.plan import BatchShape, Partition, Plan
from cotenant.device import Device
from cotenant.engine.engine import OnlineEngine
from cotenant.runtime.training import TrainingTenant

# While a batch and tasklets run side by side the host looks so often whether the batch has ended.
_ASK_EVERY_S = 100e-6
# Tasklets that fill the lane are launched for so long at most: one that is launched as slowly as it runs never does.
_FILLING_S = 1e-3


class TaskletLanes:
    """What a plan's batch leaves the job: the SMs that it does not have, and the time behind it. What launches
    tasklets returns how many. ``interrupted``: see ``Executor``."""

    def __init__(self, device: Device, engine: OnlineEngine, training: TrainingTenant) -> None:
        self._device = device
        self._engine = engine
        self._training = training
        self._behind_s: float | None = None  # when the last one on all SMs was launched, if no batch was since
        self._launch_s: dict[bool, float] = {}  # what the host took for the last batch with prompts, and without
        # What the last batch with prompts took there, and the last one without.
        self._batch_s: dict[tuple[Partition, bool], float] = {}
        self._begun_s = -math.inf  # when the batch in flight began

    def batch_was_launched(self, shape: BatchShape, launch_s: float, *, is_one_graph: bool) -> None:
        """It took the host ``launch_s``. Tasklets that lie ahead are to last until the next batch: for that the device
        is told how long the host was away, if it was for a batch whose launch is short."""
        now_s = time.perf_counter()
        if self._behind_s is not None and is_one_graph:
            self._device.host_was_away(now_s - self._behind_s)
        self._behind_s = None
        self._launch_s[shape.prefill_tokens > 0] = launch_s
        if self._engine.num_in_flight == 1:
            self._begun_s = now_s

    def batch_landed(self, shape: BatchShape, partition: Partition | None, device_ms: float) -> None:
        """The next one, if there is one in flight, begins now."""
        self._begun_s = time.perf_counter()
        if partition is not None:
            self._batch_s[partition, shape.prefill_tokens > 0] = device_ms / 1e3

    def begin_beside(self, plan: Plan, *, behind_online: bool = False) -> int:
        """Launch a tasklet on the SMs that the batch will not have, before it, whose launch takes the host a while; if
        there is room behind what is in flight. With ``behind_online`` it begins as the batch in flight ends."""
        if plan.num_beside == 0 or not self._can_train:
            return 0
        if not self._device.has_room(far_ahead=True):
            return 0
        self._device.run_tasklet(self._training.run_tasklet, behind_online=behind_online, partition=plan.partition)
        return 1

    def fill(self, plan: Plan, batch: BatchShape, next_batch: BatchShape) -> int:
        """Launch tasklets beside ``batch`` in flight, ``plan``'s, which has a partition, to last while the host
        launches the next one, which has other SMs; but not for longer than the one in flight, by what the last one
        there took."""
        assert plan.partition is not None
        batch_s = self._batch_s.get((plan.partition, batch.prefill_tokens > 0), 0.0)
        left_s = self._begun_s + batch_s - time.perf_counter()
        launch_s = self._launch_s.get(next_batch.prefill_tokens > 0, 0.0)
        return self.top_up(plan, plan.num_beside, for_s=min(launch_s, left_s))

    def top_up(self, plan: Plan, most: int, *, far_ahead: bool = False, for_s: float = 0.0) -> int:
        """Launch tasklets beside the batch in flight, without waiting, while there is room for more (see
        ``Device.has_room``) and no token to be handed on: ``most`` or fewer."""
        count, until_s = 0, time.perf_counter() + _FILLING_S
        while count < most and not self._engine.has_landed and self._can_train:
            if not self._device.has_room(far_ahead=far_ahead, for_s=for_s) or time.perf_counter() > until_s:
                break
            self._device.run_tasklet(self._training.run_tasklet, partition=plan.partition)
            count += 1
        return count

    def run_beside(
        self,
        plan: Plan,
        num_before: int,
        num_may_stay: int,
        interrupted: Callable[[], bool],
        *,
        far_ahead: bool = False,
    ) -> int:
        """Run tasklets on the SMs that batches do not have, until there is a batch to collect (more of them in flight
        than ``num_may_stay``), besides the ``num_before`` that were launched before. The last ones may go on after
        that: in the same partition the next batch's SMs are not theirs. Where there is none to wait for, as many as
        there is room for. One whose launch waits for the device would keep the host from the tokens. ``far_ahead``:
        nothing waits for the last one's end, unless somebody comes, so the lane may have several."""
        if plan.run_online and self._engine.num_in_flight == 0:
            return 0
        if plan.run_online and self._engine.num_in_flight <= num_may_stay:
            return self.top_up(plan, plan.num_beside - num_before, far_ahead=far_ahead)

        def has_come() -> bool:
            return plan.interruptible and interrupted()

        def is_over() -> bool:
            if not plan.run_online:
                return has_come()
            return self._engine.has_landed or self._training.next_waits

        count = num_before
        while count < plan.num_beside and self._training.runnable and not is_over():
            self._device.wait_for_room(is_over, _ASK_EVERY_S, far_ahead=far_ahead and not has_come())
            if not is_over():
                self._device.run_tasklet(self._training.run_tasklet, partition=plan.partition)
                count += 1
        return count - num_before

    def run_awaited(self, plan: Plan, num_beside: int, interrupted: Callable[[], bool]) -> int:
        """Run the tasklet that tasklets beside a batch stopped at, with its tokens on their way."""
        if num_beside >= plan.num_beside or not self._training.runnable or not self._training.next_waits:
            return 0
        self._device.wait_for_room(interrupted if plan.interruptible else None)
        if plan.interruptible and interrupted():
            return 0
        self._device.run_tasklet(self._training.run_tasklet, partition=plan.partition)
        return 1

    def launch_behind(self, plan: Plan, interrupted: Callable[[], bool]) -> int:
        """Launch a tasklet that begins as the batch ends: the device would else be idle while the host reads the tokens
        and hands them on. One that waits for the device would keep the host from just that."""
        if not self._can_train or (plan.interruptible and interrupted()):
            return 0
        self._device.run_tasklet(self._training.run_tasklet, behind_online=True)
        return 1

    def run_behind(self, plan: Plan, num_launched: int, interrupted: Callable[[], bool], until_s: float) -> int:
        """Tasklets on all SMs, none but the first launched after ``until_s``. Some lie ahead, also of requests that may
        come at any moment: the device would else be idle while the host plans and launches the batch that follows,
        which is there no sooner for that."""
        count = 0
        while plan.until_step_end or num_launched + count < plan.num_tasklets - plan.num_beside:
            if not self._training.runnable:
                break
            far_ahead = not self._training.next_waits
            self._device.wait_for_room(interrupted if plan.interruptible else None, far_ahead=far_ahead)
            if interrupted() and plan.interruptible:  # asked of every plan: so the loop is known not to hang
                break
            if num_launched + count > 0 and time.perf_counter() > until_s:
                break
            self._device.run_tasklet(self._training.run_tasklet)
            self._behind_s = time.perf_counter()
            count += 1
            if plan.until_step_end and self._training.at_step_end:
                break
        return count

    @property
    def _can_train(self) -> bool:
        """Whether the next tasklet can be launched now. One that waits for the device would keep the host from the
        tokens."""
        return self._training.runnable and not self._training.next_waits
