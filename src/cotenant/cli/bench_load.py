"""What ``cotenant bench serve`` sends: a part of a trace, or a synthetic load."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cotenant.core.errors import InvalidInputError

if TYPE_CHECKING:
    from cotenant.bench.serve import SyntheticLoad, TraceLoad
    from cotenant.bench.traces import Trace

DEFAULT_NUM_PROMPTS = 1000
DEFAULT_INPUT_LEN, DEFAULT_OUTPUT_LEN = 1024, 128
LEAST_GAP_S = 1e-3  # behind the last request of a part that ends with its trace


@dataclass(frozen=True, slots=True)
class LoadFlags:
    """The flags that say what is sent, by their names. None: not given."""

    trace: Path | None
    window: str | None
    busiest: float | None
    max_input_len: int | None
    max_output_len: int | None
    time_scale: float | None
    request_rate: float | None
    burstiness: float | None
    random_input_len: int | None
    random_output_len: int | None
    sweep: str | None
    num_prompts: int | None
    duration: float | None

    def load(self) -> TraceLoad | SyntheticLoad:
        """Raises InvalidInputError for flags that make no sense, alone or together."""
        if self.burstiness is not None and (self.burstiness <= 0 or math.isnan(self.burstiness)):
            raise InvalidInputError(f"--burstiness must be above 0, not {self.burstiness:g}")
        for flag, value in (("--time-scale", self.time_scale), ("--request-rate", self.request_rate)):
            if self.sweep is not None and value is not None:
                raise InvalidInputError(f"give --sweep or {flag}, not both: a sweep names all rates")
        values = None if self.sweep is None else sorted({_rate("--sweep", part) for part in self.sweep.split(",")})
        return self._synthetic(values) if self.trace is None else self.part_of_trace(self.trace, values)

    def part_of_trace(self, path: Path, scales: list[float] | None) -> TraceLoad:
        from cotenant.bench.serve import TraceLoad

        if self.request_rate is not None:
            raise InvalidInputError("give --trace or --request-rate, not both")
        of_synthetic = {
            "--burstiness": self.burstiness,
            "--random-input-len": self.random_input_len,
            "--random-output-len": self.random_output_len,
        }
        _check_not_given(of_synthetic, "synthetic load", "leave out --trace, which has its own requests")
        chosen = part_of_trace(path, self.window, self.busiest).capped(self.max_input_len, self.max_output_len)
        scales = scales or [1.0 if self.time_scale is None else _rate("--time-scale", str(self.time_scale))]
        return TraceLoad(path.name, chosen, scales, self.num_prompts, self.duration)

    def _synthetic(self, rates: list[float] | None) -> SyntheticLoad:
        from cotenant.bench.serve import SyntheticLoad

        of_trace = {
            "--window": self.window,
            "--busiest": self.busiest,
            "--time-scale": self.time_scale,
            "--max-input-len": self.max_input_len,
            "--max-output-len": self.max_output_len,
        }
        _check_not_given(of_trace, "trace", "give --trace")
        if rates is None and self.request_rate is None:
            raise InvalidInputError("give --trace, --request-rate or --sweep: what is to be sent?")
        rates = rates or [_rate("--request-rate", str(self.request_rate), may_be_infinite=True)]
        num_prompts = self.num_prompts
        if num_prompts is None and self.duration is None:
            num_prompts = DEFAULT_NUM_PROMPTS
        if num_prompts is None and math.inf in rates:
            raise InvalidInputError("--request-rate inf sends all at once: give --num-prompts, not --duration")
        burstiness = 1.0 if self.burstiness is None else self.burstiness
        input_len = self.random_input_len or DEFAULT_INPUT_LEN
        output_len = self.random_output_len or DEFAULT_OUTPUT_LEN
        return SyntheticLoad(rates, burstiness, input_len, output_len, num_prompts, self.duration)


def _check_not_given(flags: Mapping[str, object], of_what: str, instead: str) -> None:
    given = [flag for flag, value in flags.items() if value is not None]
    if given:
        are = "is" if len(given) == 1 else "are"
        raise InvalidInputError(f"{', '.join(given)} {are} of a {of_what}: {instead}")


def _rate(flag: str, text: str, may_be_infinite: bool = False) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InvalidInputError(f"{flag}: expected a number, got {text.strip()!r}") from None
    if not value > 0 or (math.isinf(value) and not may_be_infinite):
        raise InvalidInputError(f"{flag} must be above 0{'' if may_be_infinite else ' and finite'}, not {text.strip()}")
    return value


def part_of_trace(path: Path, window: str | None, busiest_s: float | None) -> Trace:
    """The requests of a file between the seconds "START:END", or of its busiest so many. Raises InvalidInputError."""
    from cotenant.bench.traces import read_trace

    if window is not None and busiest_s is not None:
        raise InvalidInputError("give --window or --busiest, not both")
    trace = read_trace(path)
    if window is not None:
        start_s, end_s = _window(window)
        trace = trace.window(start_s, _last_end_s(trace, start_s) if end_s == math.inf else end_s)
    elif busiest_s is not None:
        start_s, end_s = trace.busiest(busiest_s)
        trace = trace.window(start_s, min(end_s, _last_end_s(trace, start_s)))
    if not trace.requests:
        raise InvalidInputError(f"--window: {path} has no request between these seconds")
    return trace


def _last_end_s(trace: Trace, start_s: float) -> float:
    """Where the part of a trace that begins there ends: a mean gap after the last request."""
    if not trace.requests:
        return math.inf
    last_s = trace.requests[-1].at_s
    return max(start_s, last_s) + max(last_s / len(trace.requests), LEAST_GAP_S)


def _window(text: str) -> tuple[float, float]:
    start, colon, end = text.partition(":")
    try:
        if not colon:
            raise ValueError
        start_s, end_s = float(start or 0), float(end or math.inf)
    except ValueError:
        raise InvalidInputError(f"--window: expected START:END in seconds, got '{text}'") from None
    if not 0 <= start_s < end_s:
        raise InvalidInputError(f"--window: START must be at least 0 and before END, got '{text}'")
    return start_s, end_s
