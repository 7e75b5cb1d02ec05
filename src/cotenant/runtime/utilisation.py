"""How busy a GPU is while something is measured, and whether its power holds it back, as NVML tells it; nothing where
it cannot be asked."""

from __future__ import annotations

import importlib
import logging
import statistics
import threading
from contextlib import suppress
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
        self._samples: list[dict[str, float]] = []
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
        """Means: ``sm``, the share of time in which some SM ran a kernel; ``memory``, in which memory was read or
        written; where the GPU tells them, ``sm_clock_mhz``, ``power_w``, ``power_limit_w``, and ``power_limited``, the
        share of samples in which that limit held the clocks down. None if nothing could be read."""
        if not self._samples:
            return None
        names = [name for name in self._samples[0] if all(name in sample for sample in self._samples)]
        return {name: round(statistics.fmean(sample[name] for sample in self._samples), 4) for name in names}

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
                self._samples.append(_read(nvml, handle))
        except Exception as error:
            logger.info("utilisation is not sampled: %s", error)
        finally:
            nvml.nvmlShutdown()


def _read(nvml: Any, handle: Any) -> dict[str, float]:
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)  # percent of the time since they were asked for last
    found = {"sm": rates.gpu / 100, "memory": rates.memory / 100}
    with suppress(nvml.NVMLError, AttributeError):  # not every GPU tells, nor does every version of the package ask
        reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        found |= {
            "sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "power_limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
            "power_limited": float(bool(reasons & nvml.nvmlClocksEventReasonSwPowerCap)),
        }
    return found
