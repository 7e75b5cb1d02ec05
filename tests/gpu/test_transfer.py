"""Large copies between host and device are exact, and keep nobody who launches waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from cotenant.device.transfer import pinned, to_device, to_host

DEVICE = torch.device("cuda", 0)
# A byte more than some pieces, and less than one.
SIZES = ((3 << 20) + 1, 1)
BUSY_MS = 300.0
MOST_MS = 30.0


@pytest.mark.parametrize("size", SIZES)
def test_a_copy_is_of_what_was_there_when_it_was_asked_for(size: int) -> None:
    stream = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(stream):
        tensor = torch.zeros(size, device=DEVICE)
        torch.cuda._sleep(int(1e8))
        tensor += torch.arange(size, device=DEVICE)
        begins = torch.cuda.Event()
        begins.record()
    copy = to_host(tensor, begins)
    assert torch.equal(copy, torch.arange(size, dtype=torch.float32))
    assert not copy.is_pinned()


def test_what_is_brought_to_the_device_is_the_same() -> None:
    tensors = {str(size): torch.randn(size, 3) for size in (1, 1 << 20, 5)}
    there = to_device(tensors, DEVICE)
    assert list(there) == list(tensors)
    assert all(tensor.is_cuda and torch.equal(tensor.cpu(), tensors[name]) for name, tensor in there.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pinned_parts_are_the_same(dtype: torch.dtype) -> None:
    tensor = torch.randn((5 << 20) + 3).to(dtype)
    parts = pinned(tensor)
    assert len(parts) > 2
    assert all(part.is_pinned() for part in parts)
    assert torch.equal(torch.cat(parts), tensor)


def _copy_behind_others(training: torch.cuda.Stream) -> Callable[[], object]:
    tensor = torch.ones(40_000_000, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(training):
        torch.cuda._sleep(int(BUSY_MS * 1e6))  # cycles, some two of a ns
        begins = torch.cuda.Event()
        begins.record()
    return lambda: to_host(tensor, begins)


def _bring(training: torch.cuda.Stream) -> Callable[[], object]:
    tensors = {str(number): torch.ones(1_000_000) for number in range(40)}
    return lambda: to_device(tensors, DEVICE)


def _pin(training: torch.cuda.Stream) -> Callable[[], object]:
    tensor = torch.zeros(40_000_000, dtype=torch.bfloat16)
    return lambda: pinned(tensor)


@pytest.mark.parametrize("make", [_copy_behind_others, _bring, _pin])
def test_launches_go_on_meanwhile(make: Callable[[torch.cuda.Stream], Callable[[], object]]) -> None:
    to_host(torch.zeros(1, device=DEVICE))  # its pinned memory
    tensor, took_ms = torch.zeros(1024, device=DEVICE), []
    online, training = torch.cuda.Stream(DEVICE), torch.cuda.Stream(DEVICE)
    tensor.add_(1)
    run = threading.Thread(target=make(training))
    run.start()
    while run.is_alive():
        begin_s = time.perf_counter()
        for stream in (online, training):
            with torch.cuda.stream(stream):
                event = torch.cuda.Event()
                tensor.add_(1)
                event.record()
                event.query()
        took_ms.append((time.perf_counter() - begin_s) * 1e3)
        time.sleep(1e-3)
    run.join()
    assert len(took_ms) > 20
    assert max(took_ms) < MOST_MS
