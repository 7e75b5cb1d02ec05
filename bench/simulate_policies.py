"""What policies make of a trace on the machine of fixed latencies that the scheduler's tests have: no GPU, and seconds.

Of each window of the trace, ``--requests`` from every ``--every`` seconds on, each policy starts anew. Where
`inference-only` meets the SLO in it: in how many windows the policy does, the share of requests in time, training as a
share of its speed alone, and the same with windows in which the SLO is missed counted as 0. Where it does not: the
share in time and training.

    python bench/simulate_policies.py conv.csv --time-scale 1,2,4 --slo-tpot-ms 15,40

The machine's prompts take as long a token in small chunks as in large ones. --tiles-ms, as in 2.6,3.7,6.4,9.2, makes
the first tiles cost less than their share, for a batch reads the weights in any case; what that takes is --weights-ms.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from cotenant.bench.comparison import REFERENCE
from cotenant.bench.traces import TraceRequest, read_trace
from cotenant.config import POLICIES
from cotenant.core.errors import InvalidInputError
from cotenant.core.plan import Slo

sys.path.append(str(Path(__file__).parent.parent / "tests"))  # also of the processes that simulate

from scheduler.trace_machine import PARTITIONS, Arrival, Latencies, TraceMachine

_TTFT_MS, _ATTAINMENT, _LONGEST = 500.0, 0.99, 8192
_DEFAULT = f"{REFERENCE},adaptive,harli,llmstation,chunked"


class Cell(NamedTuple):
    """One policy in one window."""

    time_scale: float
    tpot_ms: float
    window: int
    policy: str


class Found(NamedTuple):
    """What came of it."""

    attainment: float
    harvest: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--time-scale", default="1", help="how many times as fast as it was recorded, a row each")
    parser.add_argument("--slo-tpot-ms", default="10,15,25,40")
    parser.add_argument("--policies", default=_DEFAULT, help=f"beside {REFERENCE}")
    parser.add_argument("--requests", type=int, default=200, help="in a window")
    parser.add_argument("--every", type=float, default=100.0, help="seconds of the trace from window to window")
    parser.add_argument("--weights-ms", type=float, default=Latencies().weights, help="of every batch")
    parser.add_argument(
        "--tiles-ms", default="", help="what prompts add by tiles of 128 rows, two or more; else 22.5 us a token"
    )
    arguments = parser.parse_args()
    if arguments.requests < 1 or not arguments.every > 0:
        parser.error("--requests and --every: must be above 0")
    scales, targets = (_numbers(parser, arguments, name) for name in ("time_scale", "slo_tpot_ms"))
    simulate = partial(_simulate, _latencies(parser, arguments))
    policies = list(dict.fromkeys([REFERENCE, *arguments.policies.split(",")]))
    if unknown := [name for name in policies if name not in POLICIES]:
        parser.error(f"--policies: {unknown[0]!r} is none of {', '.join(POLICIES)}")
    try:
        windows = _windows(arguments.trace, arguments.requests, arguments.every)
    except InvalidInputError as error:
        parser.error(error.message)
    if not windows:
        parser.error(f"--requests: no window of {arguments.trace} has {arguments.requests}")
    cells = [Cell(*each) for each in itertools.product(scales, targets, range(len(windows)), policies)]
    with ProcessPoolExecutor() as pool:
        outcomes = pool.map(simulate, cells, (windows[cell.window] for cell in cells))
        found = dict(zip(cells, outcomes, strict=True))
    for scale, tpot_ms in itertools.product(scales, targets):
        _tell(scale, tpot_ms, policies, {cell: of for cell, of in found.items() if cell[:2] == (scale, tpot_ms)})
    return 0


def _numbers(parser: argparse.ArgumentParser, arguments: argparse.Namespace, name: str) -> list[float]:
    text = getattr(arguments, name)
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [0.0]
    if not all(0 < number < math.inf for number in numbers):
        parser.error(f"--{name.replace('_', '-')}: expected numbers above 0, like 10,40, not {text!r}")
    return numbers


def _latencies(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Latencies:
    tiles = tuple(_numbers(parser, arguments, "tiles_ms")) if arguments.tiles_ms else ()
    if len(tiles) == 1 or not arguments.weights_ms > 0:
        parser.error("--tiles-ms: two numbers or more are needed, and --weights-ms above 0")
    return Latencies(weights=arguments.weights_ms, tiles=tiles)


def _windows(path: Path, num_requests: int, every_s: float) -> list[list[TraceRequest]]:
    requests = [each for each in read_trace(path).requests if each.input_len + each.output_len <= _LONGEST]
    starts = itertools.takewhile(lambda start_s: start_s <= requests[-1].at_s, itertools.count(0.0, every_s))
    windows = [[each for each in requests if each.at_s >= start_s][:num_requests] for start_s in starts]
    return [window for window in windows if len(window) == num_requests]


def _simulate(latencies: Latencies, cell: Cell, window: Sequence[TraceRequest]) -> Found:
    begin_s = window[0].at_s
    arrivals = [Arrival((each.at_s - begin_s) / cell.time_scale, each.input_len, each.output_len) for each in window]
    machine = TraceMachine(
        cell.policy, Slo(_TTFT_MS, cell.tpot_ms), PARTITIONS.get(cell.policy, ()), arrivals, latencies
    )
    return Found(*machine.run_trace())


def _tell(scale: float, tpot_ms: float, policies: Sequence[str], found: dict[Cell, Found]) -> None:
    served: defaultdict[bool, list[int]] = defaultdict(list)
    for cell, of in found.items():
        if cell.policy == REFERENCE:
            served[of.attainment >= _ATTAINMENT].append(cell.window)
    print(f"x {scale:g}, TPOT target {tpot_ms:g} ms: {len(served[True])} windows that {REFERENCE} serves in time")
    for policy in policies:
        met, missed = (
            [found[Cell(scale, tpot_ms, window, policy)] for window in served[is_met]] for is_met in (True, False)
        )
        in_time = [each for each in met if each.attainment >= _ATTAINMENT]
        counted = sum(each.harvest for each in in_time) / max(1, len(met))
        print(
            f"  {policy:15} in time in {len(in_time):3}: {_means(met)}, counted {counted:6.1%}; "
            f"in the {len(missed)} others {_means(missed)}"
        )


def _means(found: Sequence[Found]) -> str:
    if not found:
        return "-"
    return f"{fmean(each.attainment for each in found):6.2%}, training {fmean(each.harvest for each in found):5.1%}"


if __name__ == "__main__":
    sys.exit(main())
