"""Recorded arrivals: when requests came and how long they were. The format is found out from the content.

- Azure LLM inference (2023, 2024): CSV with ``TIMESTAMP,ContextTokens,GeneratedTokens``.
- BurstGPT: CSV with ``Timestamp`` in seconds, ``Request tokens`` and ``Response tokens``; an answer of no tokens is a
  request that failed when the trace was recorded.
- Mooncake: JSON lines with ``timestamp`` in milliseconds, ``input_length``, ``output_length`` and ``hash_ids``, one per
  block of 512 prompt tokens: prompts that begin with the same ids begin with the same tokens.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO, TypeVar

import msgspec

from cotenant.core.errors import InvalidInputError

if TYPE_CHECKING:
    import _csv

HASH_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace: ``at_s`` seconds after the trace began, lengths in tokens."""

    at_s: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival. ``num_skipped`` rows of the file had no prompt or no answer;
    ``num_too_long`` more do not fit the model, and are left out.

    ``window_s`` is the part of the file's time that was chosen; None: all of it. ``num_runs``: how many times over the
    requests are there.
    """

    format: str
    requests: list[TraceRequest]
    num_skipped: int = 0
    num_too_long: int = 0
    window_s: tuple[float, float] | None = None
    num_runs: int = 1

    @property
    def duration_s(self) -> float:
        """Of the chosen window, else until the last request; each time it is run through."""
        if self.window_s is not None:
            return (self.window_s[1] - self.window_s[0]) * self.num_runs
        return self.requests[-1].at_s

    def window(self, start_s: float, end_s: float) -> Trace:
        """The requests of ``[start_s, end_s)``, timed from ``start_s``."""
        inside = [
            replace(request, at_s=request.at_s - start_s)
            for request in self.requests
            if start_s <= request.at_s < end_s
        ]
        return replace(self, requests=inside, window_s=(start_s, end_s))

    def busiest(self, length_s: float) -> tuple[float, float]:
        """Start and end of the window of this length with the most requests; the first of several."""
        best_start_s, most, end = 0.0, 0, 0
        for start, request in enumerate(self.requests):
            while end < len(self.requests) and self.requests[end].at_s < request.at_s + length_s:
                end += 1
            if end - start > most:
                best_start_s, most = request.at_s, end - start
        return best_start_s, best_start_s + length_s

    def repeated(self, num_runs: int) -> Trace:
        """The same requests ``num_runs`` times over, one run after the other. Where no window was chosen, a mean gap
        between two requests lies between two runs; a second, if there is only one request."""
        if self.window_s is not None:
            period_s = self.duration_s
        elif len(self.requests) > 1:
            period_s = self.duration_s * len(self.requests) / (len(self.requests) - 1)
        else:
            period_s = 1.0
        requests = [
            replace(request, at_s=request.at_s + run * period_s) for run in range(num_runs) for request in self.requests
        ]
        return replace(self, requests=requests, num_runs=self.num_runs * num_runs)

    def capped(self, max_input_len: int | None, max_output_len: int | None) -> Trace:
        """The same requests, none longer than this."""
        return replace(
            self,
            requests=[
                replace(
                    request,
                    input_len=min(request.input_len, max_input_len or request.input_len),
                    output_len=min(request.output_len, max_output_len or request.output_len),
                )
                for request in self.requests
            ],
        )


def read_trace(path: Path) -> Trace:
    """Read a trace file. Raises InvalidInputError that names the line that cannot be read."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            name, read = _format_of(first, path)
            rows = list(read(file, path))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"--trace: {path} cannot be read: {error}", param="trace") from error
    requests = sorted((row for row in rows if row.input_len and row.output_len), key=lambda row: row.at_s)
    if not requests:
        raise InvalidInputError(f"--trace: {path} holds no request with a prompt and an answer", param="trace")
    start_s = requests[0].at_s
    timed = [replace(request, at_s=request.at_s - start_s) for request in requests]
    return Trace(name, timed, num_skipped=len(rows) - len(requests))


_Reader = Callable[[TextIO, Path], Iterator[TraceRequest]]


def _format_of(first_line: str, path: Path) -> tuple[str, _Reader]:
    if first_line.lstrip().startswith("{"):
        return "mooncake", _read_mooncake
    names = {name.strip().lower() for name in first_line.split(",")}
    for trace_format, columns, read in (
        ("azure", _AZURE_COLUMNS, _read_azure),
        ("burstgpt", _BURSTGPT_COLUMNS, _read_burstgpt),
    ):
        if names.issuperset(columns):
            return trace_format, read
    raise _bad_line(
        path,
        1,
        "expected the header of an Azure trace (TIMESTAMP,ContextTokens,GeneratedTokens), of a BurstGPT trace "
        "(Timestamp,Request tokens,Response tokens), or a JSON object of a Mooncake trace",
    )


_Value = TypeVar("_Value")

_AZURE_COLUMNS = ("timestamp", "contexttokens", "generatedtokens")
_BURSTGPT_COLUMNS = ("timestamp", "request tokens", "response tokens")


def _read_azure(file: TextIO, path: Path) -> Iterator[TraceRequest]:
    return _read_csv(file, path, _AZURE_COLUMNS, _seconds_of)


def _seconds_of(text: str) -> float:
    """Without a zone it is UTC: in this machine's an hour of the year would come twice, and another not at all."""
    at = datetime.fromisoformat(text.strip())
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _read_burstgpt(file: TextIO, path: Path) -> Iterator[TraceRequest]:
    return _read_csv(file, path, _BURSTGPT_COLUMNS, float)


def _read_csv(
    file: TextIO, path: Path, columns: Sequence[str], parse_time: Callable[[str], float]
) -> Iterator[TraceRequest]:
    reader = csv.reader(file)
    rows = _csv_rows(reader, path)
    header = [name.strip().lower() for name in next(rows)]
    time_index, input_index, output_index = (header.index(column) for column in columns)
    for row in rows:
        if not row:
            continue
        try:
            at_s = _value(row, time_index, columns[0], parse_time)
            input_len, output_len = (
                _value(row, index, column, _tokens)
                for index, column in zip((input_index, output_index), columns[1:], strict=True)
            )
        except ValueError as error:
            raise _bad_line(path, reader.line_num, str(error)) from None
        if not math.isfinite(at_s):
            raise _bad_line(path, reader.line_num, f"the time {row[time_index]!r} is not a finite number")
        yield TraceRequest(at_s, input_len, output_len)


def _value(row: list[str], index: int, column: str, parse: Callable[[str], _Value]) -> _Value:
    """Raises ValueError, which says what is wrong."""
    if index >= len(row):
        raise ValueError(f"there is no {column}")
    try:
        return parse(row[index])
    except ValueError:
        kind = "a count of tokens" if parse is _tokens else "a time"
        raise ValueError(f"{column} is {row[index][:100]!r}, which is not {kind}") from None


def _csv_rows(reader: _csv.Reader, path: Path) -> Iterator[list[str]]:
    try:
        yield from reader
    except csv.Error as error:  # a quote that is never closed, say
        raise _bad_line(path, reader.line_num, str(error)) from None


def _tokens(text: str) -> int:
    """A count of tokens; some copies of BurstGPT write them as 472.0. Raises ValueError."""
    count = float(text)
    if count < 0 or not count.is_integer():
        raise ValueError(text)
    return int(count)


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _MooncakeLine(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Count
    output_length: _Count
    hash_ids: tuple[_Count, ...] = ()


def _read_mooncake(file: TextIO, path: Path) -> Iterator[TraceRequest]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except msgspec.DecodeError as error:
            raise _bad_line(path, number, str(error).replace("`", "'")) from None
        yield TraceRequest(line.timestamp / 1e3, line.input_length, line.output_length, line.hash_ids)


def _bad_line(path: Path, number: int, reason: str) -> InvalidInputError:
    return InvalidInputError(f"--trace: {path}, line {number}: {reason}", param="trace")
