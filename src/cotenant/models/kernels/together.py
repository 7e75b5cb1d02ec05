"""Kernels compiled side by side. Triton compiles a kernel where it is first launched, and the host waits: a second for
each of the dozens that serving has. Compilers give the interpreter free while they work, so threads are enough."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.runtime import driver

logger = logging.getLogger(__name__)

_MOST_THREADS = 16
_NICE = 5


class _Wanted(NamedTuple):
    function: Any  # as decorated by triton.jit
    specialization: str  # what Triton calls so: types, constants, options

    def compile(self) -> Any:
        return self.function.preload(self.specialization)


@contextmanager
def compiled_together() -> Iterator[None]:
    """Run launches whose kernels this process will need. Those of kernels that it has not compiled yet do nothing, so
    what is computed inside is of no use; nor may it be read as indices. When the block ends, all are compiled, several
    at a time, and made ready to launch.

    What cannot be compiled is left to its first launch, which says why.
    """
    wanted: dict[tuple[str, str], _Wanted] = {}

    def note(*, key: str, fn: Any, compile: Any, **_: Any) -> bool:
        wanted.setdefault((fn.name, key), _Wanted(fn.jit_function, compile["specialization_data"]))
        return True  # "somebody else compiles it": the launch is left out

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before
    if wanted:
        _compile(list(wanted.values()))


def _begin_thread(device: int) -> None:
    torch.cuda.set_device(device)
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # attention's compilers take longer


def _compile(wanted: list[_Wanted]) -> None:
    num_threads = min(len(wanted), _MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(num_threads, "kernels", _begin_thread, (torch.cuda.current_device(),)) as pool:
        kernels = _all_that_end([pool.submit(each.compile).result for each in wanted])
        # What launches them is compiled too, by the host's compiler, and kept on disk. It is not taken from there by
        # several threads: all are Python modules of one name, and one that is loaded again is given to whoever loads
        # another just then, which would launch a kernel with another's arguments.
        _all_that_end([pool.submit(_compile_launcher, kernel).result for kernel in kernels])
    _all_that_end([partial(kernel.__getitem__, (1, 1, 1)) for kernel in kernels])


def _compile_launcher(kernel: Any) -> None:
    driver.active.launcher_cls(kernel.src, kernel.metadata)


def _all_that_end(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    results = []
    for task in tasks:
        try:
            results.append(task())
        except Exception as error:
            logger.warning("a kernel is compiled where it is launched: %s", error)
    return results
