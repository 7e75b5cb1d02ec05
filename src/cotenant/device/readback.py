"""What the host learns of launched work, without making the device wait for it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch


class Readback:
    """Copies tensors to the host behind what was launched on the current stream; ``wait`` returns them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._host = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._copied: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            self._copied = torch.cuda.Event()
            self._copied.record()
        self._sources = tensors  # not to be freed before they are copied

    @property
    def is_here(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._copied is None or self._copied.query()

    def wait(self) -> list[torch.Tensor]:
        """Block until the copies are here."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


class Interval:
    """When work that is launched between ``begin`` and ``end`` begins and ends on the device."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._times_s = (0.0, 0.0)
        if device.type == "cuda":
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))

    def begin(self) -> None:
        self._times_s = (time.perf_counter(), 0.0)
        if self._events is not None:
            self._events[0].record()

    def end(self) -> None:
        self._times_s = (self._times_s[0], time.perf_counter())
        if self._events is not None:
            self._events[1].record()

    @property
    def begun_s(self) -> float:
        """When the host said that it begins (``time.perf_counter``); the device may get to it later."""
        return self._times_s[0]

    @property
    def has_ended(self) -> bool:
        """Whether ``milliseconds`` would not wait."""
        return self._events is None or self._events[1].query()

    def milliseconds(self, behind: torch.cuda.Event | None = None) -> float:
        """How long it took, from the event ``behind`` on if that came after its beginning: it waited for that. Blocks
        until its end: nobody has, where nothing was read back."""
        if self._events is None:
            return (self._times_s[1] - self._times_s[0]) * 1e3
        begin, end = self._events
        end.synchronize()
        took_ms = float(begin.elapsed_time(end))
        if behind is None or self.overtook(behind):
            return took_ms
        return took_ms - max(0.0, float(begin.elapsed_time(behind)))

    def overtook(self, behind: torch.cuda.Event) -> bool:
        """Whether it ended, as it has by now, before that event came."""
        return self._events is not None and not (behind.query() and behind.elapsed_time(self._events[1]) > 0.0)

    def waited(self, behind: torch.cuda.Event) -> bool:
        """Whether that event came after its beginning: it has not where the host was slow to launch. True where the
        host's clock tells."""
        return self._events is None or (behind.query() and self._events[0].elapsed_time(behind) > 0.0)

    def gap_ms(self, earlier: Interval) -> float:
        """From the end of ``earlier`` to the beginning of this one; both have ended."""
        if self._events is not None and earlier._events is not None:
            return float(earlier._events[1].elapsed_time(self._events[0]))
        return (self._times_s[0] - earlier._times_s[1]) * 1e3
