"""What a predictor says of the iterations of a trace, told of one after the other: so another way of predicting is
tried without the device that they ran on.

    cotenant bench colocate … --trace-file trace.json
    python bench/replay.py trace.json

Several traces one after the other, each by a predictor of its own.
A row for each name of a load that a mark of the trace begins, which loads at two rates may share, and one for what no
mark comes before: all that `cotenant serve` has. "recorded": the errors of the predictor that ran; "replayed": of one
that knows nothing at first but what the trace tells, without a roofline, and takes all jobs for one. Turns of the
loop that did next to nothing are not in a trace. Batches of either that could not be predicted count in neither. Like
`bench colocate`'s, errors are relative to what was measured, "alone" of batches without training.

"at best": of batches with prompts, alone, the mean error of the best linear function of what the predictor's model of
them goes by, one for all of a trace and fitted to these very batches. A model that learns as it goes is not
far below even where what it learns changes meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from cotenant.bench.summary import error_figures
from cotenant.core.plan import BatchShape, IterationRecord, Mode
from cotenant.predictor.batches import batch_features
from cotenant.predictor.predictor import LatencyPredictor

_END = "measured until here"  # of a load's mark: what follows does not count
_ENOUGH = 50  # batches with prompts, a fit to which says something
_FITS, _LEAST_ERROR = 30, 1e-3  # of the fit to absolute errors: rounds, and the least by which one is weighed


class Replayed(NamedTuple):
    """Errors of an iteration's batch and tasklets, without the sign. ``load``: the mark that it comes behind."""

    load: str
    is_alone: bool
    recorded: float
    replayed: float
    batch: BatchShape
    taken_ms: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+", metavar="trace", help="what --trace-file has written")
    paths: list[Path] = parser.parse_args().traces
    return max(_tell(path, parser) for path in paths)


def _tell(path: Path, parser: argparse.ArgumentParser) -> int:
    """Of one trace; the exit status."""
    try:
        found = list(replay(events(path.read_text(encoding="utf-8")), LatencyPredictor("replayed", "model")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"{path} is no trace that can be replayed: {error!r}")
    if not found:
        print(f"{path}: no batch that was predicted", file=sys.stderr)
        return 1
    print(path.name)
    for load in dict.fromkeys(each.load for each in found):
        for is_alone, kind in ((True, "alone"), (False, "with training")):
            chosen = [each for each in found if (each.load, each.is_alone) == (load, is_alone)]
            if chosen:
                recorded, replayed = (_text([each[column] for each in chosen]) for column in (2, 3))
                print(f"{load}, {kind}: {len(chosen)} batches, recorded {recorded}; replayed {replayed}")
    prompts = [each for each in found if each.is_alone and each.batch.prefill_tokens]
    if len(prompts) >= _ENOUGH:
        recorded, replayed = (_text([each[column] for each in prompts]) for column in (2, 3))
        rows = [batch_features(each.batch) for each in prompts]
        features = np.zeros((len(rows), max(map(len, rows))))  # what is left off is 0
        for row, found_features in zip(features, rows, strict=True):
            row[: len(found_features)] = found_features
        best = least_error(features, np.array([each.taken_ms for each in prompts]))
        told = f"recorded {recorded}; replayed {replayed}; at best {best:.1%}"
        print(f"with prompts, alone: {len(prompts)} batches, {told}")
    return 0


def least_error(features: npt.NDArray[np.float64], taken: npt.NDArray[np.float64]) -> float:
    """The mean of the absolute errors, as shares of ``taken`` [batches], of the linear function of ``features``
    [batches, features] for which it is least: by least squares, again and again, of errors that count the less the
    larger they were."""
    shares = features / taken[:, None]
    weights, errors = np.ones_like(taken), np.ones_like(taken)
    for _ in range(_FITS):
        function = np.linalg.lstsq(shares * weights[:, None], weights, rcond=None)[0]
        errors = np.abs(shares @ function - 1.0)
        weights = 1.0 / np.sqrt(np.maximum(errors, _LEAST_ERROR))
    return float(errors.mean())


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
            is_alone, taken_ms = record.mode is Mode.NONE, arguments["taken_ms"]
            yield Replayed(load, is_alone, recorded, error, record.batch, taken_ms)


def _text(errors: list[float]) -> str:
    figures = error_figures(errors)
    return "mean {mean:.1%}, p95 {p95:.1%}, {share_above_10_percent:.1%} above 10%".format(**figures)


if __name__ == "__main__":
    sys.exit(main())
