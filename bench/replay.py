"""What a predictor says of the iterations of a trace, told of one after the other: so another way of predicting is
tried without the device that they ran on.

    cotenant bench colocate … --trace-file trace.json
    python bench/replay.py trace.json

A row for each load that a mark of the trace begins, and one for what no mark comes before: all that `cotenant serve`
has. "recorded": the errors of the predictor that ran; "replayed": of one that knows nothing at first but what the trace
tells, without a roofline, and takes all jobs for one. Turns of the loop that did next to nothing are not in a trace.
Batches of either that could not be predicted count in neither. Like `bench colocate`'s, errors are relative to what was
measured, "alone" of batches without training.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cotenant.bench.summary import error_figures
from cotenant.core.plan import IterationRecord, Mode
from cotenant.predictor.predictor import LatencyPredictor

_END = "measured until here"  # of a load's mark: what follows does not count


class Replayed(NamedTuple):
    """Errors of an iteration's batch and tasklets, without the sign. ``load``: the mark that it comes behind."""

    load: str
    is_alone: bool
    recorded: float
    replayed: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="what --trace-file has written")
    path = parser.parse_args().trace
    try:
        found = list(replay(events(path.read_text(encoding="utf-8")), LatencyPredictor("replayed", "model")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"{path} is no trace that can be replayed: {error!r}")
    if not found:
        print(f"{path}: no batch that was predicted", file=sys.stderr)
        return 1
    for load in dict.fromkeys(each.load for each in found):
        for is_alone, kind in ((True, "alone"), (False, "with training")):
            chosen = [each for each in found if (each.load, each.is_alone) == (load, is_alone)]
            if chosen:
                recorded, replayed = (_text([each[column] for each in chosen]) for column in (2, 3))
                print(f"{load}, {kind}: {len(chosen)} batches, recorded {recorded}; replayed {replayed}")
    return 0


def events(text: str) -> Iterator[dict[str, Any]]:
    """Of a trace, whose end may be missing: one a line. Raises ValueError."""
    for line in text.splitlines():
        entry = line.strip().rstrip(",")
        if entry not in ("", "[", "]"):
            yield json.loads(entry)


def replay(traced: Iterable[dict[str, Any]], predictor: LatencyPredictor) -> Iterator[Replayed]:
    """Tell the predictor of each iteration. Raises ValueError, KeyError or TypeError for what is no trace with
    records."""
    load, counts = "unmarked", True
    for event in traced:
        if event["ph"] == "i":
            counts = event["name"] != _END
            load = event["name"] if counts else load
        if event["name"] != "execute" or event["ph"] != "X":
            continue
        arguments = event["args"]
        record = msgspec.convert(arguments["record"], IterationRecord)
        predictor.observe(record)
        error, predicted_ms = predictor.last_error_ratio, arguments["predicted_ms"]
        if counts and not record.batch.empty and error is not None and predicted_ms is not None:
            recorded = abs(predicted_ms / arguments["taken_ms"] - 1)
            yield Replayed(load, record.mode is Mode.NONE, recorded, error)


def _text(errors: list[float]) -> str:
    figures = error_figures(errors)
    return "mean {mean:.1%}, p95 {p95:.1%}, {share_above_10_percent:.1%} above 10%".format(**figures)


if __name__ == "__main__":
    sys.exit(main())
