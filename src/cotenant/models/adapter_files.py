"""An adapter's two files in PEFT's format, checked against a model's shape; its weights, whether they are finite. No
torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import BinaryIO

from cotenant.core.errors import InvalidInputError
from cotenant.core.module_pattern import module_name
from cotenant.models.finite import first_not_finite
from cotenant.models.peft_config import CONFIG_FILE, AdapterConfig, read_config
from cotenant.models.safetensors_file import Header, read_header, read_whole
from cotenant.models.spec import ModelSpec

WEIGHTS_FILE = "adapter_model.safetensors"

_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """A folder whose files fit together: what they are called, and the (layer, module) pairs that have LoRA, each with
    its alpha."""

    config: AdapterConfig
    weights_path: Path
    alphas: dict[tuple[int, str], float]


def tensor_names(layer: int, module: str) -> tuple[str, str]:
    """What PEFT calls a module's A and B."""
    name = f"{_PREFIX}{module_name(layer, module)}"
    return f"{name}.lora_A.weight", f"{name}.lora_B.weight"


def read_adapter_files(folder: Path, spec: ModelSpec, max_rank: int) -> tuple[AdapterFiles, Header, mmap]:
    """What is in a folder in PEFT's format, with the header and the content of the weights' file: of the one that was
    checked, if it is replaced meanwhile.

    Raises InvalidInputError, naming the file and what is wrong there, for anything but a whole LoRA adapter for a model
    of this shape, without DoRA, biases or fully trained modules, of rank ``max_rank`` at most, with finite weights.
    """
    config, path = read_config(folder), folder / WEIGHTS_FILE
    with _opened(path) as file:
        header = read_header(file)
        files = _check(config, path, header, spec, max_rank)
        content = read_whole(file, header)
    name = first_not_finite(content, header)
    if name is not None:
        raise InvalidInputError(
            f"{path}: {name} holds weights that are NaN or infinite, with which no answer can be computed; export the "
            "adapter again, from a checkpoint whose loss was finite"
        )
    return files, header, content


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    if not path.is_file():
        raise InvalidInputError(f"{path.parent} holds no {path.name}, so it is not an adapter in PEFT's format")
    try:
        with path.open("rb") as file:
            yield file
    except (ValueError, OSError) as error:
        raise InvalidInputError(f"{path} is not a readable safetensors file: {error}") from error


def _check(config: AdapterConfig, path: Path, header: Header, spec: ModelSpec, max_rank: int) -> AdapterFiles:
    shapes, alphas = dict(header.shapes), {}
    for layer, module in config.targets(spec):
        name = module_name(layer, module)
        rank = config.rank_of(name)
        if rank > max_rank:
            raise InvalidInputError(
                f"{config.path}: rank {rank} of {name} is over --max-lora-rank, which is {max_rank}"
            )
        num_out, num_in = spec.module_shape(module)
        a_name, b_name = tensor_names(layer, module)
        _take(shapes, path, a_name, (rank, num_in))
        _take(shapes, path, b_name, (num_out, rank))
        alphas[layer, module] = config.alpha_of(name)
    if shapes:
        raise InvalidInputError(f"{path}: {min(shapes)} is no part of the adapter that {CONFIG_FILE} describes")
    return AdapterFiles(config, path, alphas)


def _take(shapes: dict[str, tuple[int, ...]], path: Path, name: str, wanted: tuple[int, int]) -> None:
    shape = shapes.pop(name, None)
    if shape is None:
        raise InvalidInputError(f"{path} lacks {name}, which {CONFIG_FILE} calls for")
    if shape != wanted:
        raise InvalidInputError(f"{path}: {name} has shape {list(shape)}; this model needs {list(wanted)}")
