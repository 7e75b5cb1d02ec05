"""Weights into a decoder: straight from safetensors, or random."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from cotenant.core.errors import InvalidInputError, NotFoundError
from cotenant.models.decoder import Decoder
from cotenant.models.registry import ResolvedModel
from cotenant.models.spec import ModelSpec
from cotenant.models.weights import Target, allocate, targets

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = ("F64", "F32", "F16", "BF16")  # quantised weights need scales that this decoder does not apply
_INIT_STD = 0.02
_NUM_NAMED = 5  # how many tensors an error lists


def load_decoder(resolved: ResolvedModel, device: torch.device, dtype: torch.dtype, seed: int) -> Decoder:
    """Put a model on a device. ``seed`` decides random weights.

    Raises NotFoundError if the folder holds no safetensors, InvalidInputError naming file and tensors if they do not
    make up the model that its config describes.
    """
    weights = allocate(resolved.spec, device, dtype)
    places = targets(resolved.spec, weights)
    if resolved.random_weights or resolved.folder is None:
        _fill_randomly(places, device, seed)
    else:
        _fill_from_folder(resolved.folder, resolved.spec, places)
    return Decoder(resolved.spec, weights)


def _fill_randomly(places: dict[str, Target], device: torch.device, seed: int) -> None:
    """Normal with standard deviation 0.02; norms are ones."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, place in places.items():
        if name.endswith("norm.weight"):
            place.view.fill_(1.0)
        else:
            place.view.normal_(0.0, _INIT_STD, generator=generator)


def _fill_from_folder(folder: Path, spec: ModelSpec, places: dict[str, Target]) -> None:
    missing = dict.fromkeys(places)
    unexpected: list[str] = []
    for path in _shards(folder):
        for name in _fill_from_shard(path, places):
            if name in places:
                missing.pop(name, None)
            elif not _is_redundant(name, spec):
                unexpected.append(name)
    if missing:
        raise InvalidInputError(f"{folder}: the checkpoint lacks {_listed(missing)}", param="model")
    if unexpected:
        raise InvalidInputError(
            f"{folder}: the checkpoint holds tensors that its config.json has no place for: {_listed(unexpected)}",
            param="model",
        )


def _shards(folder: Path) -> list[Path]:
    """The checkpoint's files."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        raise NotFoundError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}", param="model")
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InvalidInputError(f"{index} cannot be read: {error!r}", param="model") from error
    shards = [folder / Path(name).name for name in sorted(names)]
    absent = [shard.name for shard in shards if not shard.is_file()]
    if absent:
        raise NotFoundError(f"{folder}: {INDEX_FILE} names files that are not there: {_listed(absent)}", param="model")
    return shards


def _fill_from_shard(path: Path, places: dict[str, Target]) -> list[str]:
    """Copy what the file holds to its places; the names of all its tensors."""
    try:
        with safe_open(path, framework="pt") as shard:
            names: list[str] = list(shard.keys())
            for name in names:
                if name in places:
                    stored, place = shard.get_slice(name), places[name]
                    _check(path, name, tuple(stored.get_shape()), stored.get_dtype(), place)
                    place.view.copy_(shard.get_tensor(name))
            return names
    except (SafetensorError, OSError) as error:
        raise InvalidInputError(f"{path} is not a readable safetensors file: {error}", param="model") from error


def _check(path: Path, name: str, shape: tuple[int, ...], dtype: str, place: Target) -> None:
    if shape != place.shape:
        raise InvalidInputError(
            f"{path}: {name} has shape {list(shape)}, but config.json makes it {list(place.shape)}", param="model"
        )
    if dtype not in _DTYPES:
        raise InvalidInputError(
            f"{path}: {name} is stored as {dtype}; supported are {', '.join(_DTYPES)}", param="model"
        )


def _is_redundant(name: str, spec: ModelSpec) -> bool:
    """Tensors of some checkpoints that follow from the rest."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and spec.tie_word_embeddings)


def _listed(names: Iterable[str]) -> str:
    everything = list(names)
    more = f" and {len(everything) - _NUM_NAMED} more" if len(everything) > _NUM_NAMED else ""
    return ", ".join(everything[:_NUM_NAMED]) + more
