"""The files of a checkpoint in safetensors. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from cotenant.core.errors import InvalidInputError, NotFoundError
from cotenant.models.safetensors_file import without_repetition

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_NUM_NAMED = 5  # how many names an error lists


def shards(folder: Path) -> list[Path]:
    """The checkpoint's files. Raises NotFoundError where there are none or some lack, InvalidInputError for an index
    that cannot be read."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        raise NotFoundError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}", param="model")
    try:
        content = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=without_repetition)
        names = set(content["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise InvalidInputError(f"{index} cannot be read: {error!r}", param="model") from error
    for name in names:
        if not isinstance(name, str):
            raise InvalidInputError(
                f"{index}: weight_map must name a file for each tensor, not {name!r}", param="model"
            )
    found = [folder / Path(name).name for name in sorted(names)]
    absent = [shard.name for shard in found if not shard.is_file()]
    if absent:
        raise NotFoundError(
            f"{folder}: {INDEX_FILE} names files that are not there, or are none: {listed(absent)}", param="model"
        )
    return found


def listed(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    everything = list(names)
    more = f" and {len(everything) - _NUM_NAMED} more" if len(everything) > _NUM_NAMED else ""
    return ", ".join(everything[:_NUM_NAMED]) + more
