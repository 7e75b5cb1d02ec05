"""A Chrome trace of the worker: what the loop, the online lane and the best-effort lane did when.

Opened in chrome://tracing or Perfetto. The format is a JSON array whose end may be missing, so events are appended as
they come, and what a crash leaves can be read; it is written when the server stops. Times are the host's; a batch and
a tasklet end when the host is told.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

import msgspec

from cotenant.core.errors import InvalidInputError
from cotenant.core.output_file import BEGINNING, check_trace_file, claim, make_way
from cotenant.core.plan import BatchShape, IterationRecord, Partition, Plan
from cotenant.core.tasklet import TaskletRun
from cotenant.device.base import FinishedTasklet

logger = logging.getLogger(__name__)

_PROCESS = 1
_FLUSH_EVERY_S = 1.0
# Traces from before. A server whose worker dies five times soon after one another ends: of these the first is there.
_NUM_KEPT = 4
_IDLE_MS = 0.1  # an iteration without a batch or tasklets that was shorter has done nothing


class Track(IntEnum):
    """A row of the picture. Behind the last one come rows of tasklets on parts of the SMs, by how many those are."""

    LOOP = 1
    ONLINE = 2
    BEST_EFFORT = 3


_NAMES = {Track.LOOP: "loop", Track.ONLINE: "online lane", Track.BEST_EFFORT: "best-effort lane"}


class Trace:
    """Begins a file anew, and makes its folder; a trace that is there is renamed, with ``.old`` behind its name, and so
    are some from before. Times are seconds on time.perf_counter's clock."""

    def __init__(self, path: Path, about: str = "") -> None:
        """``about``: by what it is told from others. Raises InvalidInputError if the file cannot be written, or
        something else is there."""
        check_trace_file(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            make_way(path, _NUM_KEPT)
            self._file = path.open("wb", buffering=0)
            claim(self._file)
        except OSError as error:
            raise InvalidInputError(f"--trace-file: {path} cannot be written: {error}", param="trace-file") from error
        self._is_over = False
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray(BEGINNING)
        self._start_s = self._flushed_s = time.perf_counter()
        self._add({"ph": "M", "pid": _PROCESS, "name": "process_name", "args": {"name": f"cotenant worker{about}"}})
        self._named: set[int] = set()
        for track, name in _NAMES.items():
            self._name_row(track, name)

    def span(self, track: int, name: str, start_s: float, end_s: float, **arguments: object) -> None:
        """Something took from ``start_s`` to ``end_s``."""
        # One's end is another's start to the digit: viewers leave out what overlaps.
        begins_us, ends_us = (round((each_s - self._start_s) * 1e6, 1) for each_s in (start_s, end_s))
        self._add(
            {
                "ph": "X",
                "pid": _PROCESS,
                "tid": track,
                "name": name,
                "ts": begins_us,
                "dur": round(max(0.0, ends_us - begins_us), 1),
                "args": arguments,
            }
        )

    def mark(self, name: str) -> None:
        """Something begins now, or ends."""
        now_us = round((time.perf_counter() - self._start_s) * 1e6, 1)
        self._add({"ph": "i", "pid": _PROCESS, "tid": Track.LOOP, "name": name, "ts": now_us, "s": "p"})

    def iteration(
        self, begins_s: Sequence[float], plan: Plan, record: IterationRecord, deviation_ratio: float | None
    ) -> None:
        """One turn of the loop, if it did anything, with all that the predictor was told of it: what it would have said
        of these iterations had it learned in another way can be found out from the file (bench/replay.py).
        ``begins_s``: of observe, plan, execute, publish, and the end. ``deviation_ratio``: see ``LatencyPredictor``."""
        if record.batch.empty and not record.tasklets and not record.beside and record.total_ms < _IDLE_MS:
            return
        taken_ms = record.taken_ms
        arguments = {
            "mode": plan.mode.value,
            "planned_tasklets": plan.num_tasklets,
            "until_step_end": plan.until_step_end,
            "planned_fused": plan.num_fused,
            "planned_ms": record.predicted_ms,
            "ended_tasklets": record.num_tasklets,
            "taken_ms": round(taken_ms, 3),
            "predicted_ms": None if deviation_ratio is None else round(taken_ms * (1 + deviation_ratio), 3),
            "total_ms": round(record.total_ms, 3),
            "record": record,
        }
        if plan.partition is not None:
            arguments |= {"online_sms": plan.partition.online_sms, "most_beside": plan.num_beside}
        for name, start_s, end_s in zip(
            ("observe", "plan", "execute", "publish"), begins_s[:-1], begins_s[1:], strict=True
        ):
            self.span(Track.LOOP, name, start_s, end_s, **(arguments if name == "execute" else {}))

    def batch(
        self,
        shape: BatchShape,
        end_s: float,
        device_ms: float,
        partition: Partition | None = None,
        fused: TaskletRun | None = None,
    ) -> None:
        """A batch whose tokens the host has at ``end_s``. ``partition``: whose online SMs it had; None: all.
        ``fused``: the tasklets that ran in it."""
        parts = [f"prefill {shape.prefill_tokens}"] if shape.prefill_tokens else []
        parts += [f"decode {shape.num_decode}"] if shape.num_decode else []
        arguments: dict[str, object] = {"context_tokens": shape.context_tokens, "adapters": shape.num_adapters}
        if partition is not None:
            arguments["sms"] = partition.online_sms
        if fused is not None:
            kind, num_tokens = fused.shape.kind.value, fused.shape.num_tokens
            arguments["fused"] = {"kind": kind, "tasklets": fused.count, "tokens": num_tokens}
        self.span(Track.ONLINE, ", ".join(parts), end_s - device_ms / 1e3, end_s, **arguments)

    def tasklets(self, finished: Sequence[FinishedTasklet]) -> None:
        for tasklet in finished:
            start_s, arguments = tasklet.end_s - tasklet.elapsed_ms / 1e3, {"tokens": tasklet.shape.num_tokens}
            row: int = Track.BEST_EFFORT
            if tasklet.partition is not None:
                num_sms = arguments["sms"] = tasklet.partition.best_effort_sms
                row += num_sms
                self._name_row(row, f"{_NAMES[Track.BEST_EFFORT]}, {num_sms} SMs")
            self.span(row, tasklet.shape.kind.value, start_s, tasklet.end_s, **arguments)

    def flush(self) -> None:
        """Write what has come together, once a second. A full disk ends the trace, and nothing else."""
        now_s = time.perf_counter()
        if now_s >= self._flushed_s + _FLUSH_EVERY_S:
            self._flushed_s = now_s
            self._write()

    def close(self) -> None:
        """End the array, behind an event after which no comma stands."""
        if not self._is_over:
            self.mark("end")
            del self._buffer[-2:]
            self._buffer += b"\n]\n"
        self._write()
        self._file.close()

    def _name_row(self, row: int, name: str) -> None:
        """Before its first event."""
        if row not in self._named:
            self._named.add(row)
            self._add({"ph": "M", "pid": _PROCESS, "tid": row, "name": "thread_name", "args": {"name": name}})

    def _add(self, event: dict[str, object]) -> None:
        if not self._is_over:
            self._buffer += self._encoder.encode(event)
            self._buffer += b",\n"

    def _write(self) -> None:
        num_written = 0
        try:
            with memoryview(self._buffer) as content:
                while num_written < len(content):  # a disk that is nearly full takes a part
                    num_written += self._file.write(content[num_written:])
        except OSError as error:
            logger.error("the trace ends here, its file cannot be written: %s", error)
            self._is_over = True
            num_of_a_line = num_written - (self._buffer.rfind(b"\n", 0, num_written) + 1)
            with contextlib.suppress(OSError):  # each event is a line, and a part of one makes the file unreadable
                self._file.truncate(self._file.tell() - num_of_a_line)
        self._buffer.clear()
