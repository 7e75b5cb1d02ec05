"""The CUDA driver, called from Python through ``cuda.bindings``, which torch's CUDA builds bring along."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from cotenant.core.errors import InvalidInputError


class Driver:
    """The driver's calls, each return code checked. ``api``: the module, for its types and constants."""

    def __init__(self) -> None:
        """Raises InvalidInputError without ``cuda.bindings``."""
        try:
            self.api: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise InvalidInputError(
                "--device cuda needs the Python package cuda-bindings, which torch's CUDA builds install: "
                f"pip install cuda-bindings, of the same major version as torch.version.cuda ({torch.version.cuda})",
                param="device",
            ) from error

    def call(self, name: str, *arguments: Any) -> Any:
        """The call's value: None if it has none, a tuple if there are several. Raises torch.OutOfMemoryError, and
        RuntimeError for other failures, a call that the bindings do not have among them."""
        function = getattr(self.api, name, None)
        if function is None:
            raise RuntimeError(f"{name}: these bindings of the CUDA driver do not have it")
        result, *values = function(*arguments)
        if result == self.api.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{name}: the device has no memory left")
        if result != self.api.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}{arguments} failed: {result}")
        return tuple(values) if len(values) > 1 else values[0] if values else None
