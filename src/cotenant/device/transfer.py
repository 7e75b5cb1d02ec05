"""Large tensors between host and device, while the device and whoever launches on it go on.

A copy to or from pageable memory is the driver's own: it may keep all launches of the process waiting, for as long as
what lies before it on the stream takes, and longer. Pinned memory is copied by the device alone; but to make a large
piece of it keeps launches waiting, too, about a millisecond per MB. So it goes by way of a few small pieces that stay.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from cotenant.host_memory import allocate

# One is filled or emptied while the other is on its way.
_NUM_PIECES, _PIECE_BYTES = 2, 4 << 20
_ASK_EVERY_S = 50e-6
# Of what is pinned for longer.
_PINNED_BYTES, _BETWEEN_PINNED_S = 2 << 20, 1e-3
_PINNED_BEFORE_S = 0.2e-3  # torch gives such memory again in less time


def to_host(tensor: torch.Tensor, begins: torch.cuda.Event | None = None) -> torch.Tensor:
    """A copy in host memory, when it is there, of a contiguous tensor as it is when the device gets to ``begins``: None
    where nobody is changing it. May be called on any thread; on a thread of its own nobody else waits."""
    if tensor.is_cuda:
        return _transfer(tensor.device).to_host(tensor.detach(), begins)
    return host_tensor(tensor.shape, tensor.dtype).copy_(tensor.detach())


def to_device(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Copies there, when they are there, of tensors of one dtype; where they are already, the same tensors. On a GPU
    they are views of one, which is allocated on the current stream. May be called on any thread, as ``to_host``."""
    if device.type != "cuda" or not tensors or any(tensor.is_cuda for tensor in tensors.values()):
        return {name: tensor.to(device) for name, tensor in tensors.items()}
    assert len({tensor.dtype for tensor in tensors.values()}) == 1, "of one dtype"
    sizes = [tensor.numel() for tensor in tensors.values()]
    parts = torch.empty(sum(sizes), dtype=next(iter(tensors.values())).dtype, device=device).split(sizes)
    _transfer(device).to_device([tensor.detach().contiguous() for tensor in tensors.values()], parts)
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(tensors.items(), parts, strict=True)}


def host_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in host memory; see ``allocate``."""
    size = math.prod(shape)
    if size == 0:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(allocate(size * dtype.itemsize), dtype=dtype).view(shape)


def pinned(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A copy of a flat tensor in small parts, pinned, to be copied to a GPU without anybody waiting. Others get to
    launch between any two parts that are pinned now, and not had from what was. May be called on any thread, as
    ``to_host``."""
    parts = []
    for source in tensor.split(_PINNED_BYTES // tensor.element_size()):
        begin_s = time.perf_counter()
        part = torch.empty_like(source, pin_memory=True)
        is_new = time.perf_counter() - begin_s > _PINNED_BEFORE_S
        _copy_on_host(source.view(torch.uint8), part.view(torch.uint8))
        parts.append(part)
        if is_new:
            time.sleep(_BETWEEN_PINNED_S)
    return tuple(parts)


class _Transfer:
    """One at a time, on a stream that nobody else has: torch has 32 in all, and gives them to whoever asks again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pieces = [torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_NUM_PIECES)]
        self._lock = threading.Lock()

    def to_host(self, tensor: torch.Tensor, begins: torch.cuda.Event | None) -> torch.Tensor:
        copy = host_tensor(tensor.shape, tensor.dtype)
        arriving: deque[tuple[torch.cuda.Event, torch.Tensor, torch.Tensor]] = deque()
        with self._lock, torch.cuda.stream(self._stream):
            if begins is not None:
                self._stream.wait_event(begins)
            for index, (source, target) in enumerate(zip(_parts(tensor), _parts(copy), strict=True)):
                if len(arriving) == _NUM_PIECES:
                    _take_over(*arriving.popleft())
                piece = self._pieces[index % _NUM_PIECES][: len(source)]
                piece.copy_(source, non_blocking=True)
                arriving.append((self._noted(), piece, target))
            while arriving:
                _take_over(*arriving.popleft())
        return copy

    def to_device(self, tensors: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """``targets``: as long, flat, and allocated on the current stream."""
        pairs = (
            pair
            for tensor, target in zip(tensors, targets, strict=True)
            for pair in zip(_parts(tensor), _parts(target), strict=True)
        )
        sent: deque[torch.cuda.Event] = deque()
        with self._lock:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # where the memory was another's before
            with torch.cuda.stream(self._stream):
                for index, (source, target) in enumerate(pairs):
                    if len(sent) == _NUM_PIECES:
                        _wait(sent.popleft())
                    piece = self._pieces[index % _NUM_PIECES][: len(source)]
                    _copy_on_host(source, piece)
                    target.copy_(piece, non_blocking=True)
                    sent.append(self._noted())
                while sent:
                    _wait(sent.popleft())

    def _noted(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event


@functools.cache
def _transfer(device: torch.device) -> _Transfer:
    return _Transfer(device)


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    return iter(tensor.view(-1).view(torch.uint8).split(_PIECE_BYTES))


def _take_over(arrives: torch.cuda.Event, piece: torch.Tensor, target: torch.Tensor) -> None:
    _wait(arrives)
    _copy_on_host(piece, target)


def _wait(event: torch.cuda.Event) -> None:
    while not event.query():
        time.sleep(_ASK_EVERY_S)


def _copy_on_host(source: torch.Tensor, target: torch.Tensor) -> None:
    """By this thread alone: torch would take all that there are, and the loop's with them."""
    np.copyto(target.numpy(), source.numpy())
