"""When to launch the next tasklet: shortly before the one in flight ends.

Earlier, and a tasklet more stands between a stop and the device being idle; later, and the device waits for the host.
Where the device has nothing else to do until the host has made and launched a batch, as long ahead as that takes.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice

import torch

from cotenant.core.plan import Partition
from cotenant.core.tasklet import TaskletShape
from cotenant.device.base import FinishedTasklet

# How long before the end the host is to wake: what it oversleeps, the way to the launch, and the launch. It differs
# from host to host, so each launch that was too late adds to it, and each in time takes a little off: that makes one in
# twenty late, by little. The most bounds what a stop waits for.
_FIRST_LEAD_S, _LEAST_LEAD_S, _MOST_LEAD_S = 150e-6, 50e-6, 300e-6
_LEAD_RISE_S, _LEAD_DECLINE_S = 10e-6, 0.5e-6
# A launch later than this after the host woke for it was held up by something else, and one that took longer than this
# has compiled or captured: they are no measure.
_PROMPTLY_S, _ORDINARY_LAUNCH_S = 0.5e-3, 1e-3
# Tasklets may lie ahead for as long as the host is away, within these bounds, and so many at most. Beside a batch
# nobody measures that.
_LEAST_FAR_LEAD_S, _MOST_FAR_LEAD_S = 0.1e-3, 6e-3
_FAR_LEAD_BESIDE_S = 2.5e-3
_MOST_AHEAD = 32
# How much longer or shorter than before it is expected to be away when it was. So that is about the median: as often as
# not the device has something to do until the host is back, and else it waits for little; one long time changes little.
_FAR_LEAD_CHANGE = 1.05
_SHORTEST_SLEEP_S = 20e-6
# Each question to the driver costs the host microseconds. An answer may be out of date by so much: that does no harm.
_JUST_ASKED_S = 50e-6
_MOST_SHAPES = 1000  # that are remembered
# How fast an expected time follows longer and shorter ones. To launch early costs less than to launch late. How fast a
# mean follows, for whoever waits.
_GROWTH, _DECLINE = 0.05, 0.3
_MEAN_CHANGE = 0.1
# A launch that took the host longer, and most of the tasklet's time, is no measure: it has compiled or captured.
_UNUSUAL_LAUNCH_S = 5e-3
# How long a sleep may be while nobody wants to be asked: what is expected may be wrong.
_LONGEST_UNASKED_SLEEP_S = 20e-3


_Kind = tuple[TaskletShape, Partition | None]


class _Launch:
    """The one under way. A process has one thread that launches."""

    is_trial = False


def note_trial() -> None:
    """Part of the tasklet that is being launched is done in a way that is not known to be as fast as others: how long
    the tasklet takes tells nothing of the next one like it."""
    _Launch.is_trial = True


@dataclass(slots=True)
class _InFlight:
    """``before``: the end of the one before, if that was in flight. ``start``: None where nothing lies between the two
    on the stream; this one's start is then the end of the one before or, if it was launched after that (``is_late``),
    its launch. ``waits``: the tasklet begins behind another stream's work; then there always is a ``before``.
    ``not_before_s`` and ``ended_by_s``: the host has seen, by its own clock, that it did not end before the one, and
    had ended by the other."""

    shape: TaskletShape
    partition: Partition | None
    before: torch.cuda.Event | None
    is_late: bool
    waits: bool
    start: torch.cuda.Event | None
    end: torch.cuda.Event
    launched_s: float
    launch_s: float  # what the host took
    is_trial: bool
    not_before_s: float  # not before its end was recorded, to begin with
    ended_by_s: float = math.inf


class TaskletQueue:
    """The tasklets in flight: at most one, and for a moment its successor, or some more if told so. They run one after
    the other, also where they are launched on several streams.

    Times are the host's. Where the stream was idle a tasklet starts as it is launched; from there on the device's own
    clock tells when each one ended, however late the host hears of it. The two clocks drift apart, so what the host has
    seen itself bounds what the device's says.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """``stream``: of the first tasklet, unless it says otherwise."""
        self.stream = stream  # of the tasklet that was launched last
        self.num_launched = 0
        self._in_flight: deque[_InFlight] = deque()
        self._ended: deque[_InFlight] = deque()  # not noted yet
        self._finished: list[FinishedTasklet] = []
        self._expected_ms: dict[_Kind, float] = {}
        self._mean_ms: dict[_Kind, float] = {}
        self._lead_s = _FIRST_LEAD_S
        self._woken_s = 0.0  # when the host woke for the next launch; 0: it did not sleep until then
        self._far_lead_s = _FAR_LEAD_BESIDE_S
        self._last_end_s = 0.0
        self._asked_s = -math.inf  # when the first of two in flight had not ended
        self._events: list[torch.cuda.Event] = []  # to be used again

    def launch(
        self,
        launch: Callable[[], TaskletShape],
        stream: torch.cuda.Stream,
        partition: Partition | None = None,
        behind: torch.cuda.Stream | None = None,
        *,
        waits_for_others: bool = False,
    ) -> None:
        """Launch a tasklet on ``stream``, the current one, with the SMs of ``partition``. ``behind``: it waits for what
        was launched there. ``waits_for_others``: something else lies before it on the stream that is no tasklet: its
        time does not begin as the one before ends."""
        if stream is not self.stream:
            stream.wait_stream(self.stream)
            self.stream = stream
        before = self._in_flight[-1].end if self._in_flight else None
        start = None
        if behind is not None:
            if before is None:
                before = self._event()
                before.record(stream)
                self._last_end_s = time.perf_counter()
            stream.wait_stream(behind)
        if before is None or behind is not None or waits_for_others:
            start = self._event()
            start.record(stream)
        launched_s = time.perf_counter()
        _Launch.is_trial = False
        shape = launch()
        is_trial = _Launch.is_trial
        end = self._event()
        recorded_s = time.perf_counter()
        end.record(stream)
        self.num_launched += 1
        asked_s = time.perf_counter()
        launch_s = asked_s - launched_s
        waits = behind is not None
        is_late = waits or before is None or before.query()
        if not is_late and self._in_flight:
            self._in_flight[-1].not_before_s = asked_s
        is_measure = launched_s - self._woken_s < _PROMPTLY_S and launch_s < _ORDINARY_LAUNCH_S
        if is_measure and not waits:  # there was one in flight when the host went to sleep
            self._follow(is_late=is_late)
        self._in_flight.append(
            _InFlight(shape, partition, before, is_late, waits, start, end, launched_s, launch_s, is_trial, recorded_s)
        )
        if not is_late and len(self._in_flight) == 2:
            self._asked_s = asked_s

    def wait_for_room(
        self, interrupted: Callable[[], bool] | None = None, ask_every_s: float = 1e-3, *, far_ahead: bool = False
    ) -> None:
        """Sleep until nothing is in flight, or one tasklet that is about to end, or ``interrupted`` says yes.
        ``far_ahead``: or several that end about when the host can be back with a batch; a batch beside them has its own
        SMs, and waits for none."""
        if time.perf_counter() - self._asked_s < _JUST_ASKED_S:
            self._note_ended()
        else:
            self.collect()
        self._woken_s = 0.0
        while self._in_flight:
            is_far, left_s, most = self._until_room(far_ahead=far_ahead)
            if left_s <= 0.0 and len(self._in_flight) <= most:
                return
            if interrupted is not None and interrupted():
                return
            longest_s = _LONGEST_UNASKED_SLEEP_S if interrupted is None else ask_every_s
            if left_s > longest_s:
                time.sleep(longest_s)
                self.collect()
                continue
            overdue_s = -0.1 * left_s  # others may be at work beside it: the longer it takes, the longer it will
            time.sleep(max(left_s, min(overdue_s, longest_s), _SHORTEST_SLEEP_S))
            self._woken_s = 0.0 if is_far or left_s <= 0.0 else time.perf_counter()
            if left_s > 0.0 and len(self._in_flight) == most + 1 and self._in_flight[0].end.query():
                # It is time: what there is to note of the one that has ended can wait until the next is launched.
                self._take_ended()
                return
            self.collect()

    def has_room(self, *, far_ahead: bool = False, for_s: float = 0.0) -> bool:
        """Whether ``wait_for_room`` would not sleep. ``for_s``: or those in flight end before that."""
        self.collect()
        self._woken_s = 0.0
        if not self._in_flight:
            return True
        _, left_s, most = self._until_room(far_ahead=far_ahead, for_s=for_s)
        return left_s <= 0.0 and len(self._in_flight) <= most

    def _until_room(self, *, far_ahead: bool, for_s: float = 0.0) -> tuple[bool, float, int]:
        """With something in flight: whether several may be, the time until the next one is to be launched, and how many
        may be in flight then."""
        # What never ran may take any time: no third one behind it.
        is_far = (far_ahead or for_s > self._lead_s) and all(
            (each.shape, each.partition) in self._expected_ms for each in self._in_flight
        )
        far_s = max(for_s, self._far_s() if far_ahead else 0.0)
        lead_s, most = (far_s, _MOST_AHEAD - 1) if is_far else (self._lead_s, 1)
        return is_far, self._left_s(self._expected_ms, len(self._in_flight)) - lead_s, most

    def host_was_away(self, seconds: float) -> None:
        """From the launch of an iteration's last tasklet until the next one's batch was launched."""
        change = _FAR_LEAD_CHANGE if seconds > self._far_lead_s else 1 / _FAR_LEAD_CHANGE
        self._far_lead_s = min(_MOST_FAR_LEAD_S, max(_LEAST_FAR_LEAD_S, change * self._far_lead_s))

    def num_ended(self) -> int:
        self.collect()
        return self.num_launched - len(self._in_flight)

    @property
    def is_busy(self) -> bool:
        """Whether one is in flight now."""
        return bool(self._in_flight) and not self._in_flight[-1].end.query()

    def end_on_all_sms(self) -> torch.cuda.Event | None:
        """An event at the end of those in flight, if the last has all SMs. The queue does not use it again."""
        last = self._in_flight[-1] if self._in_flight else None
        if last is None or last.partition is not None or last.end.query():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def left_on_all_sms_ms(self) -> float:
        """How long it is until the last one ends that has all SMs; 0 if none is in flight. Shapes that never ran count
        as nothing."""
        self.collect()
        count = max((place for place, each in enumerate(self._in_flight, 1) if each.partition is None), default=0)
        return max(0.0, self._left_s(self._mean_ms, count)) * 1e3 if count else 0.0

    def collect(self) -> None:
        """Take note of what has ended."""
        while self._in_flight and self._in_flight[0].end.query():
            self._take_ended()
        self._note_ended()

    def take_finished(self) -> list[FinishedTasklet]:
        self.collect()
        finished, self._finished = self._finished, []
        return finished

    def _take_ended(self) -> None:
        ended = self._in_flight.popleft()
        ended.ended_by_s = time.perf_counter()
        self._ended.append(ended)

    def _note_ended(self) -> None:
        while self._ended:
            self._take_note(self._ended.popleft())

    def _take_note(self, done: _InFlight) -> None:
        start, before = done.start, done.before
        if before is None:
            assert start is not None
            elapsed_ms = start.elapsed_time(done.end)
            self._last_end_s = done.launched_s + elapsed_ms / 1e3
        else:
            since_ms = elapsed_ms = before.elapsed_time(done.end)
            if start is not None:
                elapsed_ms = start.elapsed_time(done.end)
            elif done.is_late:  # by a few microseconds, as a rule, on the host's clock
                elapsed_ms -= max(0.0, min(since_ms, (done.launched_s - self._last_end_s) * 1e3))
            self._last_end_s += since_ms / 1e3
            self._events.append(before)
        self._last_end_s = min(max(self._last_end_s, done.not_before_s), done.ended_by_s)
        if start is not None:
            self._events.append(start)
        # With the host held up at the wrong moment, all of its time may seem to have passed before its launch.
        is_timed = elapsed_ms > 0 and not done.is_trial
        if is_timed and done.launch_s < max(_UNUSUAL_LAUNCH_S, 0.5e-3 * elapsed_ms):
            self._finished.append(FinishedTasklet(done.shape, elapsed_ms, self._last_end_s, done.partition))
            kind = (done.shape, done.partition)
            self._expected_ms[kind] = _followed(self._expected_ms.pop(kind, elapsed_ms), elapsed_ms)
            mean_ms = self._mean_ms.pop(kind, elapsed_ms)
            self._mean_ms[kind] = mean_ms + _MEAN_CHANGE * (elapsed_ms - mean_ms)
            if len(self._expected_ms) > _MOST_SHAPES:
                for times_ms in (self._expected_ms, self._mean_ms):
                    del times_ms[next(iter(times_ms))]

    def _follow(self, *, is_late: bool) -> None:
        """``is_late``: the tasklet before had ended when its successor had been launched."""
        change_s = _LEAD_RISE_S if is_late else -_LEAD_DECLINE_S
        self._lead_s = min(_MOST_LEAD_S, max(_LEAST_LEAD_S, self._lead_s + change_s))

    def _event(self) -> torch.cuda.Event:
        return self._events.pop() if self._events else torch.cuda.Event(enable_timing=True)

    def _far_s(self) -> float:
        return _FAR_LEAD_BESIDE_S if self._in_flight[-1].partition is not None else self._far_lead_s

    def _left_s(self, times_ms: Mapping[_Kind, float], count: int) -> float:
        """Until the first ``count`` in flight have ended, by what each kind takes: those that never ran count as
        nothing."""
        first = self._in_flight[0]
        start_s = first.launched_s if first.before is None else self._last_end_s
        if first.is_late and not first.waits:
            start_s = max(start_s, first.launched_s)
        if first.waits and first.before is not None and first.start is not None:
            has_begun = first.start.query()
            start_s = start_s + first.before.elapsed_time(first.start) / 1e3 if has_begun else time.perf_counter()
        expected_ms = [times_ms.get((each.shape, each.partition), 0.0) for each in islice(self._in_flight, count)]
        first_s = start_s + expected_ms[0] / 1e3 - time.perf_counter()
        # Where it is late, beside a batch, those behind it have not begun.
        return max(0.0, first_s) + sum(expected_ms[1:]) / 1e3 if len(expected_ms) > 1 else first_s


def _followed(known: float, measured: float) -> float:
    return known + (_GROWTH if measured > known else _DECLINE) * (measured - known)
