"""What a predictor has learned, as bytes that outlive it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from cotenant.predictor.batches import BatchStates
from cotenant.predictor.linear import MOST_NUMBER, LinearState
from cotenant.predictor.ratio import Ratio

_VERSION = 12
_MOST = MOST_NUMBER


class _Head(msgspec.Struct):
    version: int
    of: tuple[str, str]


class Export(msgspec.Struct):
    """``of``: hardware and model. ``records``: (the rest of their group; shape; mean, deviation, count). Models and
    ratios of partitions go by their SMs, see ``PartitionModels``."""

    of: tuple[str, str]
    records: list[tuple[tuple[int | str, ...], Any, float, float, int]]
    batches: BatchStates
    tasklet_models: dict[str, LinearState]
    partition_models: list[tuple[tuple[int, ...], LinearState]]
    partition_ratios: list[tuple[tuple[int, ...], Ratio]]
    prior_ratios: dict[str, Ratio]
    version: int = _VERSION


def encode_parts(head: Export, records: Iterable[list[Any]]) -> Iterator[bytes]:
    """JSON in parts: of ``head``, which has no records, and then of each list of them."""
    fields = msgspec.structs.asdict(head)
    del fields["records"]
    yield msgspec.json.encode(fields)[:-1] + b',"records":['
    separator = b""
    for part in records:
        if part:
            yield separator + msgspec.json.encode(part)[1:-1]
            separator = b","
    yield b"]}"


def decode(exported: bytes, of: tuple[str, str]) -> Export:
    """Raises ValueError for what is no export of this version, hardware and model."""
    try:
        head = msgspec.json.decode(exported, type=_Head)
        if head.version != _VERSION or head.of != of:
            raise ValueError(f"measured on {head.of}, version {head.version}, not on {of}, version {_VERSION}")
        export = msgspec.json.decode(exported, type=Export)
        _check(export)
    except (msgspec.DecodeError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return export


def _check(export: Export) -> None:
    """Raises ValueError or TypeError for what no predictor has learned: it would be carried on for ever."""
    for _, shape, mean_ms, deviation_ms, count in export.records:
        hash(as_tuple(shape))
        takes_time = mean_ms > 0 or (mean_ms == 0 and as_tuple(shape)[:1] == ("fused",))  # inside a step it may not
        _require(takes_time and mean_ms < _MOST and 0 <= deviation_ms < _MOST and 1 <= count < _MOST, "a record")
    ratios = [ratio for _, ratio in export.partition_ratios]
    ratios += [*export.prior_ratios.values(), *export.batches.ratios.values(), *export.batches.after_training]
    for ratio in ratios:
        _require(0 < ratio.mean < _MOST and 0 <= ratio.deviation < _MOST and 0 <= ratio.count < _MOST, "a ratio")
    models = [export.batches.decodes, export.batches.prompts, *export.tasklet_models.values()]
    models += [state for _, state in export.partition_models]
    for model in models:
        numbers = (*model.weights, *model.covariance)
        _require(all(abs(each) < _MOST for each in numbers) and 0 <= model.num_samples < _MOST, "a model")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"{what} holds numbers that were never measured")


def as_tuple(shape: Any) -> Any:
    """A record's shape as it was: JSON has lists where it had tuples."""
    return tuple(map(as_tuple, shape)) if isinstance(shape, list) else shape
