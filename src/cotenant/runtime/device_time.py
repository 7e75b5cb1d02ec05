"""Where the time of a device goes that requests and a job share: what batches had, alone and with training, and what
training had alone. As durations, which the device itself has measured; nothing is said of when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cotenant.core.plan import BatchShape
from cotenant.core.tasklet import TaskletShape
from cotenant.device.base import FinishedTasklet


@dataclass(slots=True)
class DeviceTime:
    """Milliseconds, from the construction on: of batches with prompt tokens and of those without, in each case on all
    SMs (``alone``), or on a partition's or with training tokens in the batch (``shared``); and of tasklets on all SMs,
    or on a partition's without a batch beside them, by shape with their number."""

    prompts_alone_ms: float = 0.0
    prompts_shared_ms: float = 0.0
    decode_alone_ms: float = 0.0
    decode_shared_ms: float = 0.0
    num_decode: int = 0
    tasklets: defaultdict[TaskletShape, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0, 0.0]))

    def batch(self, shape: BatchShape, device_ms: float, *, shared: bool) -> None:
        """One that has ended."""
        if shape.prefill_tokens:
            if shared:
                self.prompts_shared_ms += device_ms
            else:
                self.prompts_alone_ms += device_ms
            return
        self.num_decode += 1
        if shared:
            self.decode_shared_ms += device_ms
        else:
            self.decode_alone_ms += device_ms

    def ended(self, finished: Sequence[FinishedTasklet], *, beside: bool) -> None:
        """Tasklets. ``beside``: there was a batch meanwhile, and those on a partition's SMs have no time of their
        own."""
        for tasklet in finished:
            if tasklet.partition is None or not beside:
                entry = self.tasklets[tasklet.shape]
                entry[0] += 1
                entry[1] += tasklet.elapsed_ms

    def tasklets_ms(self, duration_s: float) -> dict[TaskletShape, float]:
        """By shape, what one took on average of ``duration_s``, in which nothing else ran: with the host's time
        between two, which is training's as well."""
        total_ms = sum(taken_ms for _, taken_ms in self.tasklets.values())
        return {
            shape: taken_ms / count * (duration_s * 1e3 / total_ms)
            for shape, (count, taken_ms) in self.tasklets.items()
        }

    def figures(self, duration_s: float, alone_ms: Mapping[TaskletShape, float]) -> dict[str, float]:
        """Shares of ``duration_s``, which add up to 1: of batches, of ``training_alone``, the tasklets with no batch
        beside them, and of ``rest``, with neither, less what the two overlapped.

        ``training_work``: the share that those tasklets would have taken at ``alone_ms``, each shape's time without
        requests (``tasklets_ms``). Harvest beyond that comes from tasklets that shared. ``decode_step_ms``: of batches
        without prompts, on average.
        """
        wall_ms = duration_s * 1e3
        training_ms = sum(taken_ms for _, taken_ms in self.tasklets.values())
        work_ms = sum(
            count * alone_ms.get(shape, taken_ms / count) for shape, (count, taken_ms) in self.tasklets.items()
        )
        decode_ms = self.decode_alone_ms + self.decode_shared_ms
        online_ms = self.prompts_alone_ms + self.prompts_shared_ms + decode_ms
        shares = {
            "prompts_alone": self.prompts_alone_ms,
            "prompts_shared": self.prompts_shared_ms,
            "decode_alone": self.decode_alone_ms,
            "decode_shared": self.decode_shared_ms,
            "training_alone": training_ms,
            "rest": wall_ms - online_ms - training_ms,
            "training_work": work_ms,
        }
        return {
            **{name: round(taken_ms / wall_ms, 4) for name, taken_ms in shares.items()},
            "decode_steps_per_s": round(self.num_decode / duration_s, 2),
            "decode_step_ms": round(decode_ms / self.num_decode, 3) if self.num_decode else 0.0,
        }
