"""How busy a GPU is while something is measured, as NVML tells it; nothing where it cannot be asked."""

from __future__ import annotations

import importlib
import logging
import threading
from types import TracebackType
from typing import Any

import torch

logger = logging.getLogger(__name__)

_SAMPLE_EVERY_S = 0.1


class UtilisationSampler:
    """Samples in a thread while it is entered as a context manager; ``figures`` afterwards. It needs the package
    nvidia-ml-py (pynvml) and a CUDA device that is not a slice of one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._samples: list[tuple[int, int]] = []  # percent: of SMs, of memory
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> UtilisationSampler:
        if self._device.type == "cuda":
            self._thread = threading.Thread(target=self._sample, name="utilisation", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def figures(self) -> dict[str, float] | None:
        """``sm``: the mean share of time in which some SM ran a kernel; ``memory``: in which memory was read or
        written. None if nothing could be read."""
        if not self._samples:
            return None
        sms, memory = zip(*self._samples, strict=True)
        return {"sm": round(sum(sms) / len(sms) / 100, 4), "memory": round(sum(memory) / len(memory) / 100, 4)}

    def _sample(self) -> None:
        try:
            nvml: Any = importlib.import_module("pynvml")
            nvml.nvmlInit()
        except Exception as error:  # not there, or no driver that it knows: measured is what can be
            logger.info("utilisation is not sampled: %s", error)
            return
        try:
            uuid = torch.cuda.get_device_properties(self._device).uuid
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            while not self._over.wait(_SAMPLE_EVERY_S):
                rates = nvml.nvmlDeviceGetUtilizationRates(handle)
                self._samples.append((rates.gpu, rates.memory))
        except Exception as error:
            logger.info("utilisation is not sampled: %s", error)
        finally:
            nvml.nvmlShutdown()
