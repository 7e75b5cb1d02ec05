"""Which base model it is that jobs and adapters belong to. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from cotenant.config import ModelConfig
from cotenant.core.errors import InvalidInputError
from cotenant.models.registry import ResolvedModel
from cotenant.models.safetensors_file import LENGTH_BYTES, read_header
from cotenant.models.shards import shards

# Of config.json, what changes without the model.
_INCIDENTAL = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
# Tensors of up to 16 KiB are read whole, norms and biases among them, and larger ones in as many places.
_NUM_SAMPLES = 4
_SAMPLE_BYTES = 4096
_NUM_DIGITS = 20


def fingerprint(resolved: ResolvedModel, config: ModelConfig) -> str:
    """The same for the same config and weights, wherever their folder lies and whatever dtype they are served in;
    another for others. Of weights it reads headers, sizes and a sample of each tensor, however large that is.
    Random weights are their seed; that devices draw other numbers from it is not looked at.

    Raises NotFoundError or InvalidInputError for a folder that could not be loaded either.
    """
    digest = hashlib.sha256()
    if resolved.folder is None:
        digest.update(config.model.encode())
    else:
        given = json.loads((resolved.folder / "config.json").read_text(encoding="utf-8"))
        kept = {key: value for key, value in given.items() if key not in _INCIDENTAL}
        digest.update(json.dumps(kept, sort_keys=True).encode())
    if resolved.random_weights or resolved.folder is None:
        digest.update(f"random weights of seed {config.seed}".encode())
    else:
        for path in shards(resolved.folder):
            for part in _parts(path):
                digest.update(part)
    return digest.hexdigest()[:_NUM_DIGITS]


def _parts(path: Path) -> Iterator[bytes]:
    """What stands for a file of weights."""
    try:
        with path.open("rb", buffering=0) as file:
            header = read_header(file)
            yield header.size_bytes.to_bytes(8, "little")
            yield header.raw[LENGTH_BYTES:]
            for _, (begin, end) in sorted(header.spans.items()):
                yield from _samples(file, len(header.raw) + begin, end - begin)
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{path} is not a readable safetensors file: {error}", param="model") from error


def _samples(file: BinaryIO, begin: int, size_bytes: int) -> Iterator[bytes]:
    """Pieces of a tensor at equal distances, the first and the last of its bytes included."""
    last = max(0, size_bytes - _SAMPLE_BYTES)
    for offset in sorted({last * index // (_NUM_SAMPLES - 1) for index in range(_NUM_SAMPLES)}):
        file.seek(begin + offset)
        yield file.read(min(_SAMPLE_BYTES, size_bytes - offset))
