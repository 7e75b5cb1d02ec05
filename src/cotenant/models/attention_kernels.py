"""FlashInfer's kernels, for prompts, compiled for this model by nvcc when they are wanted for the first time and kept
on disk.

"fa2" runs anywhere. "fa3" is for Hopper and takes several times as long to compile: it is compiled while the server
serves, and prompts go through "fa2" until it is there.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from cotenant.core.errors import InvalidInputError
from cotenant.models.attention_sources import building_paged_only
from cotenant.models.spec import ModelSpec

logger = logging.getLogger(__name__)

_NICE = 10
_HEAD_DIMS = (64, 128, 256)


class AttentionKernels:
    """Begins to compile, or to load what was compiled before, on a thread of its own."""

    def __init__(self, head_dim: int, dtype: torch.dtype, has_window: bool, backends: tuple[str, ...]) -> None:
        self._key = (dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, has_window, False, False)
        self._ended = {backend: threading.Event() for backend in backends}
        self._failures: dict[str, Exception] = {}
        self._go_on = threading.Event()
        threading.Thread(target=self._build, name="attention-kernels", daemon=True).start()

    def is_ready(self, backend: str) -> bool:
        """Whether the kernels of ``backend`` can be used at once."""
        return backend in self._ended and self._ended[backend].is_set() and backend not in self._failures

    def wait(self, backend: str) -> None:
        """Block until the kernels of ``backend`` can be used or will never be. Raises InvalidInputError if everything
        needs them and they cannot be made."""
        if backend in self._ended:
            if backend != "fa2":
                self.compile_the_rest()
            self._ended[backend].wait()
        if backend == "fa2" and backend in self._failures:
            reason = (str(self._failures[backend]).strip().splitlines() or ["no reason given"])[0]
            raise InvalidInputError(
                f"FlashInfer's attention kernels cannot be made ready ({reason}): they are compiled by nvcc, ninja and "
                "a C++ compiler ($CXX, or else c++), which must be installed; without the package flashinfer-python "
                "torch's own attention is used"
            )

    def compile_the_rest(self) -> None:
        """Nobody is in a hurry any more."""
        self._go_on.set()

    def _is_compiled(self, backend: str) -> bool:
        from flashinfer.jit.attention import gen_batch_prefill_module

        return bool(gen_batch_prefill_module(backend, *self._key).is_compiled)

    def _build(self) -> None:
        os.environ["PATH"] = _search_path()
        for backend, ended in self._ended.items():
            try:
                self._build_one(backend)
            except Exception as error:
                logger.warning("attention kernels %s cannot be compiled: %s", backend, error)
                self._failures[backend] = error
            ended.set()  # whatever happened: the start waits for it

    def _build_one(self, backend: str) -> None:
        from flashinfer.prefill import get_batch_prefill_module

        if backend != "fa2" and not self._is_compiled(backend):
            self._go_on.wait()  # compiling takes all cores, and the start has use for them; so have requests
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # of this thread and its compilers
        start = time.perf_counter()
        if backend == "fa2":
            self._build_paged_only(backend)
        get_batch_prefill_module(backend, *self._key)
        logger.info("attention kernels %s are ready after %.1f s", backend, time.perf_counter() - start)

    def _build_paged_only(self, backend: str) -> None:
        """FlashInfer keeps what was built and gives it to all who ask. Should it not build, nothing is kept."""
        from flashinfer.prefill import get_batch_prefill_module

        try:
            with building_paged_only():
                get_batch_prefill_module(backend, *self._key)
        except Exception as error:
            logger.warning("attention kernels %s are compiled with all that FlashInfer has: %s", backend, error)


def kernel_head_dim(head_dim: int) -> int | None:
    """The least width that heads of ``head_dim`` have room in and that there are kernels for, FlashInfer's and those of
    decode steps; None: there is none.

    With zeros behind them narrower heads have the same products, and what they attend to has zeros behind it, too."""
    return next((width for width in _HEAD_DIMS if width >= head_dim), None)


def has_compiler() -> bool:
    """Whether nvcc is where FlashInfer looks for it, and what it is called with."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = Path(home) / "bin" / "nvcc" if home else Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")
    called = ("ninja", os.environ.get("CXX", "c++"))
    return nvcc.exists() and all(shutil.which(name, path=_search_path()) for name in called)


def _search_path() -> str:
    """PATH, and last Python's own folder: FlashInfer brings ninja there and calls it by its name, but PATH does not
    lead there unless the virtual environment is activated."""
    return os.pathsep.join(filter(None, (os.environ.get("PATH"), str(Path(sys.executable).parent))))


def begin_import() -> None:
    """Import FlashInfer, where it is, on a thread of its own: it takes a second or two."""
    if importlib.util.find_spec("flashinfer") is not None:
        threading.Thread(target=_import, name="import-flashinfer", daemon=True).start()


def _import() -> None:
    with suppress(Exception):  # who needs it will say so
        importlib.import_module("flashinfer.prefill")


def prepare(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> AttentionKernels:
    """The kernels for this model; the first call begins to make them."""
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    width = kernel_head_dim(spec.head_dim)
    assert width is not None, f"no kernels for heads of {spec.head_dim}"
    return _prepared(width, dtype, spec.sliding_window is not None, ("fa2", "fa3") if is_hopper else ("fa2",))


@cache
def _prepared(head_dim: int, dtype: torch.dtype, has_window: bool, backends: tuple[str, ...]) -> AttentionKernels:
    return AttentionKernels(head_dim, dtype, has_window, backends)
