"""What a predictor has learned, as bytes that outlive it."""

from __future__ import annotations

from typing import Any

import msgspec

from cotenant.predictor.linear import LinearState
from cotenant.predictor.ratio import Ratio

_VERSION = 2


class _Head(msgspec.Struct):
    version: int
    of: tuple[str, str]


class Export(msgspec.Struct):
    """``of``: hardware and model. ``records``: (adapters, or nothing for tasklets without a batch; shape; mean,
    deviation, count). Models and ratios of partitions go by their SMs, see ``PartitionModels``."""

    of: tuple[str, str]
    records: list[tuple[tuple[Any, ...], Any, float, float, int]]
    batch_model: LinearState
    tasklet_models: dict[str, LinearState]
    partition_models: list[tuple[tuple[int, ...], LinearState]]
    partition_ratios: list[tuple[tuple[int, ...], Ratio]]
    prior_ratios: dict[str, Ratio]
    version: int = _VERSION


def decode(exported: bytes, of: tuple[str, str]) -> Export:
    """Raises ValueError for what is no export of this version, hardware and model."""
    try:
        head = msgspec.json.decode(exported, type=_Head)
        if head.version != _VERSION or head.of != of:
            raise ValueError(f"measured on {head.of}, version {head.version}, not on {of}, version {_VERSION}")
        return msgspec.json.decode(exported, type=Export)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error


def as_tuple(shape: Any) -> Any:
    """A record's shape as it was: JSON has lists where it had tuples."""
    return tuple(map(as_tuple, shape)) if isinstance(shape, list) else shape
