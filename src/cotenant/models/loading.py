"""Weights into a decoder: straight from safetensors, or random."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from cotenant.core.errors import InvalidInputError
from cotenant.models.decoder import Decoder
from cotenant.models.quantization import require_support
from cotenant.models.registry import ResolvedModel
from cotenant.models.safetensors_file import read_header
from cotenant.models.shards import listed, shards
from cotenant.models.spec import ModelSpec
from cotenant.models.weights import EMBEDDING, HEAD, DecoderWeights, Target, allocate, targets, with_compressed

_DTYPES = ("F64", "F32", "F16", "BF16")  # quantised weights need scales that this decoder does not apply
_INIT_STD = 0.02
_NUM_READERS = 4
_PINNED_BYTES = 16 << 20  # of each of a reader's two buffers
_COMPARED_ROWS = 4096  # at once, of two tensors


def load_decoder(
    resolved: ResolvedModel,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    quantization: str | None = None,
    *,
    compress: bool = False,
) -> Decoder:
    """Put a model on a device. ``seed`` decides random weights; ``quantization`` is None or "fp8". ``compress``: decode
    steps read compressed copies of the matrices, of those that get smaller.

    Raises NotFoundError if the folder holds no safetensors, InvalidInputError naming file and tensors if they do not
    make up the model that its config describes, or if the device cannot run it quantised.
    """
    if quantization is not None:
        require_support(quantization, device, dtype, resolved.spec)
    weights = load_weights(resolved, device, dtype, seed, quantization)
    if compress:
        weights = with_compressed(weights)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # of what matrices were compressed by
    return Decoder(resolved.spec, weights)


def load_weights(
    resolved: ResolvedModel, device: torch.device, dtype: torch.dtype, seed: int, quantization: str | None = None
) -> DecoderWeights:
    """``load_decoder``'s weights alone, and for any device."""
    weights = allocate(resolved.spec, device, dtype, quantization)
    places = targets(resolved.spec, weights)
    if resolved.random_weights or resolved.folder is None:
        _fill_randomly(places, device, seed)
    else:
        _fill_from_folder(resolved.folder, resolved.spec, places, device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what was staged: the KV cache is made of what is free
    return weights


def _fill_randomly(places: Mapping[str, Target], device: torch.device, seed: int) -> None:
    """Normal with standard deviation 0.02; norms are ones."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, place in places.items():
        staged = place.staging()
        if name.endswith("norm.weight"):
            staged.fill_(1.0)
        else:
            staged.normal_(0.0, _INIT_STD, generator=generator)
        place.store(staged)


class _Stored(NamedTuple):
    """Where a tensor is."""

    path: Path
    shard: Any  # the open file


def _fill_from_folder(folder: Path, spec: ModelSpec, places: Mapping[str, Target], device: torch.device) -> None:
    """Checks everything that the headers say before the first weight is read."""
    stored: dict[str, _Stored] = {}
    repeated: list[tuple[str, _Stored]] = []
    tied_head: _Stored | None = None
    unexpected: list[str] = []
    with ExitStack() as stack:
        for path in shards(folder):
            with _reading(path):
                with path.open("rb") as file:
                    read_header(file)  # which refuses what safe_open takes: a tensor that is named twice
                shard = stack.enter_context(safe_open(path, framework="pt"))
                for name in list(shard.keys()):
                    if name in stored:
                        repeated.append((name, _Stored(path, shard)))
                    elif name in places:
                        header = shard.get_slice(name)
                        _check(path, name, tuple(header.get_shape()), header.get_dtype(), places[name])
                        stored[name] = _Stored(path, shard)
                    elif name == HEAD and spec.tie_word_embeddings:
                        tied_head = _Stored(path, shard)
                    elif not name.endswith("rotary_emb.inv_freq"):  # of old checkpoints: it follows from config.json
                        unexpected.append(name)
        missing = [name for name in places if name not in stored]
        if missing:
            raise InvalidInputError(f"{folder}: the checkpoint lacks {listed(missing)}", param="model")
        if unexpected:
            raise InvalidInputError(
                f"{folder}: the checkpoint holds tensors that its config.json has no place for: {listed(unexpected)}",
                param="model",
            )
        for name, copy in repeated:
            _check_copy(folder, name, stored[name], copy)
        if tied_head is not None:
            _check_tied(tied_head, stored[EMBEDDING], places[EMBEDDING].dtype)
        _copy_all(stored, places, device)


def _check_copy(folder: Path, name: str, first: _Stored, second: _Stored) -> None:
    """One that differs is refused, whichever of them the index names: transformers takes the last file's, others the
    one of the index."""
    with _reading(second.path):
        slices = first.shard.get_slice(name), second.shard.get_slice(name)
        is_same = slices[0].get_dtype() == slices[1].get_dtype() and _is_same(*slices)
    if not is_same:
        raise InvalidInputError(
            f"{folder}: the checkpoint holds {name} twice, in {first.path.name} and in {second.path.name}, and they "
            "differ: take the wrong one out, or download both files again",
            param="model",
        )


def _check_tied(head: _Stored, embedding: _Stored, dtype: torch.dtype) -> None:
    """A head of its own is not dropped for the embedding: transformers would not tie the two. It is not loaded either,
    since memory is planned by what config.json says."""
    with _reading(head.path):
        is_same = _is_same(head.shard.get_slice(HEAD), embedding.shard.get_slice(EMBEDDING), dtype)
    if not is_same:
        raise InvalidInputError(
            f"{head.path}: {HEAD} is not {EMBEDDING}, though config.json says tie_word_embeddings true: set that to "
            f"false to use this head, or take {HEAD} out of the checkpoint",
            param="model",
        )


def _is_same(first: Any, second: Any, dtype: torch.dtype | None = None) -> bool:
    """Whether two tensors in files have the same bytes, ``dtype``: once they are of this type."""
    shape = first.get_shape()
    starts = range(0, shape[0], _COMPARED_ROWS) if shape else ()
    pairs = ([each[start : start + _COMPARED_ROWS] for each in (first, second)] for start in starts)
    return bool(shape == second.get_shape()) and all(
        torch.equal(*(part.to(dtype or part.dtype).view(torch.uint8) for part in pair)) for pair in pairs
    )


def _copy_all(stored: Mapping[str, _Stored], places: Mapping[str, Target], device: torch.device) -> None:
    """Several threads: most of the time goes into copies out of the page cache, and into waiting for the disk."""
    is_cuda = device.type == "cuda"
    copies: SimpleQueue[_Copy] = SimpleQueue()
    storing = Lock()

    def load(name: str) -> None:
        path, shard = stored[name]
        copy = copies.get()
        on_device: AbstractContextManager[object] = torch.cuda.device(device) if is_cuda else nullcontext()
        try:
            with on_device:
                with _reading(path):
                    tensor = shard.get_tensor(name)
                staged = places[name].staging()
                copy(tensor, staged)
                with storing:  # the first call compiles the kernel
                    places[name].store(staged)
        finally:
            copies.put(copy)

    for _ in range(_NUM_READERS):
        copies.put(_PinnedCopy() if is_cuda else _copy)
    with ThreadPoolExecutor(_NUM_READERS, "load") as pool:
        for _ in pool.map(load, stored):
            pass


_Copy = Callable[[torch.Tensor, torch.Tensor], object]


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


class _PinnedCopy:
    """Copies mapped files to the GPU by way of two pinned buffers: one is filled while the other is sent."""

    def __init__(self) -> None:
        self._stages = [
            (torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2)
        ]

    def __call__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        num_elements = _PINNED_BYTES // target.element_size()
        parts = zip(source.flatten().split(num_elements), target.view(-1).split(num_elements), strict=True)
        for index, (part, place) in enumerate(parts):
            buffer, sent = self._stages[index % 2]
            sent.synchronize()
            staged = buffer.view(target.dtype)[: part.numel()]
            staged.copy_(part)
            place.copy_(staged, non_blocking=True)
            sent.record()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, ValueError) as error:
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
