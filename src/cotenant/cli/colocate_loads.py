"""The loads of `cotenant bench colocate`: steady decoding, and traces at several rates."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cotenant.bench.traces import Trace
from cotenant.cli.bench_load import LEAST_GAP_S, part_of_trace
from cotenant.cli.output import say_phase
from cotenant.core.errors import InvalidInputError
from cotenant.core.plan import Slo
from cotenant.scheduler.space import sm_shares

if TYPE_CHECKING:
    from cotenant.runtime.colocate_bench import ColocateBench
    from cotenant.runtime.colocate_cell import Cell
    from cotenant.runtime.load import Arrival


CONTEXT, NUM_TOKENS = 1024, 512  # of steady decoding, where the model takes so many


@dataclass(frozen=True, slots=True)
class ColocateLoad:
    """``parameters``: its name and what it is, as each of its cells has them in the JSON. ``measure``: what a policy
    does under it with these targets."""

    parameters: dict[str, Any]
    measure: Callable[[str, Slo], Cell]


def read_traces(
    paths: Sequence[Path], busiest_s: float | None, limit: int, window: str | None = None
) -> dict[str, Trace]:
    """The requests of each file, or of a part of it (``part_of_trace``), that fit ``limit`` tokens, by the files'
    names. Raises InvalidInputError."""
    traces: dict[str, Trace] = {}
    for path in paths:
        if path.stem in traces:
            raise InvalidInputError(f"--trace: two files are named {path.stem}", param="trace")
        trace = part_of_trace(path, window, busiest_s)
        fitting = [each for each in trace.requests if each.input_len + each.output_len <= limit]
        if not fitting:
            raise InvalidInputError(f"--trace: no request of {path} fits {limit} tokens", param="trace")
        traces[path.stem] = replace(trace, requests=fitting, num_too_long=len(trace.requests) - len(fitting))
    return traces


def trace_digest(path: Path) -> str:
    """By which a file's requests are told from those of another one of its name."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def steady_lengths(context: int | None, num_tokens: int | None, batch_size: int, limit: int) -> tuple[int, int]:
    """Of so many sequences that decode, the tokens around which they do and how many are timed. What is not given
    (None) is as usual, or less where a sequence would else be longer than ``limit``: fewer tokens first, down to such
    contexts as are the same for all policies. What is given is not looked at."""
    from cotenant.runtime.steady import shortest_context, steady_len

    def most(usual: int, least: int, lengths: Callable[[int], tuple[int, int]]) -> int:
        fitting = (n for n in range(usual, least, -1) if steady_len(batch_size, *lengths(n)) <= limit)
        return next(fitting, least)

    if num_tokens is None:
        given = context
        num_tokens = most(NUM_TOKENS, 8, lambda n: (min(CONTEXT, shortest_context(n)) if given is None else given, n))
    if context is None:
        timed = num_tokens
        context = most(CONTEXT, 2, lambda n: (n, timed))
    return context, num_tokens


@dataclass(frozen=True, slots=True)
class SteadyPlan:
    """``batch_size`` sequences that decode together, around ``context`` tokens each, timed for ``num_tokens``."""

    batch_size: int
    context: int
    num_tokens: int

    @property
    def parameters(self) -> dict[str, Any]:
        """As its cells have them in the JSON."""
        return {"load": "steady", **asdict(self)}

    @property
    def longest(self) -> int:
        """Tokens of its longest sequence."""
        from cotenant.runtime.steady import steady_len

        return steady_len(self.batch_size, self.context, self.num_tokens)

    @property
    def wished(self) -> int:
        """Tokens of the longest sequence that it has where the model takes as many: others teach a margin first."""
        from cotenant.runtime.steady import learning_len

        return max(self.longest, learning_len(self.batch_size))

    def load(self, bench: ColocateBench, seed: int) -> ColocateLoad:
        """What was planned, to be measured."""
        return ColocateLoad(
            self.parameters,
            lambda policy, slo: bench.steady(policy, slo, self.batch_size, self.context, self.num_tokens, seed),
        )


def plan_steady(sizes: Sequence[int], context: int | None, num_tokens: int | None, limit: int) -> list[SteadyPlan]:
    """For each of the batch sizes, with what is not given as ``steady_lengths`` has it. Raises InvalidInputError where
    a sequence would be longer than ``limit``."""
    if not sizes:
        return []
    largest = max(sizes)
    flag = "context" if context is not None else "batch-sizes" if num_tokens is None else "num-tokens"
    context, num_tokens = steady_lengths(context, num_tokens, largest, limit)
    plans = [SteadyPlan(size, context, num_tokens) for size in sizes]
    longest = max(plan.longest for plan in plans)
    if longest > limit and flag == "batch-sizes":
        raise InvalidInputError(
            f"--batch-sizes: {largest} sequences have up to {longest} tokens with those before the timing, while "
            f"latencies are learned, more for more sequences, and the model takes {limit}; ask for fewer",
            param=flag,
        )
    if longest > limit:
        raise InvalidInputError(
            f"--{flag}: {num_tokens} tokens of {largest} sequences around {context} take up to {longest} with those "
            f"before the timing, while latencies are learned: {longest - limit} more than the {limit} that the model "
            "takes",
            param=flag,
        )
    return plans


@dataclass(frozen=True, slots=True)
class TracePlan:
    """The requests of a trace at a rate. ``parameters``: as its cells have them in the JSON."""

    parameters: dict[str, Any]
    trace: Trace
    time_scale: float

    @property
    def duration_s(self) -> float:
        return self.trace.duration_s / self.time_scale

    @property
    def longest(self) -> int:
        """Tokens of its longest request."""
        return max(each.input_len + each.output_len for each in self.trace.requests)

    def load(self, bench: ColocateBench, seed: int) -> ColocateLoad:
        """What was planned, to be measured."""
        arrivals = self.arrivals()
        return ColocateLoad(
            self.parameters, lambda policy, slo: bench.trace(policy, slo, arrivals, self.duration_s, seed)
        )

    def arrivals(self) -> list[Arrival]:
        """Its requests, when they are due at this rate."""
        from cotenant.runtime.load import Arrival

        scale, requests = self.time_scale, self.trace.requests
        return [Arrival(each.at_s / scale, each.input_len, each.output_len) for each in requests]


def plan_trace(
    name: str, trace: Trace, time_scale: float, min_requests: int, seconds: float | None = None
) -> TracePlan:
    """A trace ``time_scale`` times as fast as it was recorded, as often as it takes to be ``min_requests``.
    ``seconds``: the part of it that is over by then, or by when as many have come. Raises InvalidInputError where all
    of it is one moment."""
    start_s, end_s = trace.window_s or (0.0, trace.duration_s)
    if seconds is not None:
        length_s = max(seconds * time_scale, _time_of(trace, min_requests))
        if length_s < end_s - start_s:
            trace = replace(trace.window(0.0, length_s), window_s=(start_s, start_s + length_s))
    num_runs = max(1, math.ceil(min_requests / len(trace.requests)))
    plan = TracePlan({}, trace.repeated(num_runs), time_scale)
    if plan.trace.duration_s <= LEAST_GAP_S * num_runs:
        raise InvalidInputError(
            f"--trace: all requests of {name} come at one moment, so there is no time in which training could be "
            "measured beside them; say how long with --window 0:SECONDS",
            param="trace",
        )
    parameters = {
        "load": "trace",
        "trace": name,
        "format": trace.format,
        "time_scale": time_scale,
        "window_s": trace.window_s,
        "num_runs": num_runs,
        "request_rate": round(len(plan.trace.requests) / plan.duration_s, 4),
    }
    return replace(plan, parameters=parameters)


def learn(
    bench: ColocateBench,
    plans: Sequence[SteadyPlan | TracePlan],
    missing: Sequence[tuple[int, Slo, str]],
    seconds: float,
) -> None:
    """What is known of latencies is common to all policies: who is measured first is not to pay for what the others
    then know. So before the ``missing`` cells are (the number of a plan, a target, a policy), each of their policies
    serves the beginning of their first trace, so long at most (``ColocateBench.learn``); and of the first load, where
    that is a steady one, those that choose among partitions have a cell of which nothing is kept."""
    first, slo, _ = missing[0]
    policies = list(dict.fromkeys(policy for _, _, policy in missing))
    steady = plans[first] if isinstance(plans[first], SteadyPlan) and bench.description()["num_sms"] else None
    trace = next((plan for plan in (plans[index] for index, _, _ in missing) if isinstance(plan, TracePlan)), None)
    explorers = [policy for policy in policies if steady is not None and len(sm_shares(policy)) > 1]
    if explorers or (trace is not None and seconds):
        say_phase("learning how long things take")
    if steady is not None:
        for policy in explorers:
            steady.load(bench, first).measure(policy, slo)
    if trace is not None and seconds:
        arrivals = trace.arrivals()
        for policy in policies:
            bench.learn(policy, slo, arrivals, min(seconds, trace.duration_s))


def _time_of(trace: Trace, num_requests: int) -> float:
    """The tenth of a second of a trace by which so many have come; infinite if they never do."""
    if num_requests > len(trace.requests):
        return math.inf
    return (math.floor(10 * trace.requests[num_requests - 1].at_s) + 1) / 10
