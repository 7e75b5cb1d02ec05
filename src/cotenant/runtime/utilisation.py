"""How busy a GPU is while something is measured, and whether its power holds it back, as NVML tells it; nothing where
it cannot be asked."""

from __future__ import annotations

import importlib
import logging
import statistics
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

import torch

logger = logging.getLogger(__name__)

_SAMPLE_EVERY_S = 0.1
_COUNTERS_EVERY = 10  # samples; each read of the counters is a call into the driver that takes longer than the others


class UtilisationSampler:
    """Samples in a thread while it is entered as a context manager; ``figures`` afterwards. It needs the package
    nvidia-ml-py (pynvml) and a CUDA device that is not a slice of one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._samples: list[dict[str, float]] = []
        self._counted: list[dict[str, float]] = []
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
        share of samples in which that limit held the clocks down; where it counts them (``Counters``), ``busy_sms``,
        the share of the SMs that ran a kernel, and ``bandwidth``, that of the memory's bandwidth that was used. None if
        nothing could be read."""
        if not self._samples:
            return None
        return _means(self._samples) | (_means(self._counted) if self._counted else {})

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
            with _counters(nvml, handle) as counters:
                while not self._over.wait(_SAMPLE_EVERY_S):
                    self._samples.append(_read(nvml, handle))
                    if counters is not None and len(self._samples) % _COUNTERS_EVERY == 0:
                        with suppress(nvml.NVMLError):
                            self._counted.append(counters.since())
        except Exception as error:
            logger.info("utilisation is not sampled: %s", error)
        finally:
            nvml.nvmlShutdown()


def _means(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of what all samples have."""
    names = [name for name in samples[0] if all(name in sample for sample in samples)]
    return {name: round(statistics.fmean(sample[name] for sample in samples), 4) for name in names}


class Counters:
    """What a GPU counts by itself (NVML's GPM; Hopper and later), from one call of ``since`` to the next."""

    def __init__(self, nvml: Any, handle: Any, samples: Sequence[Any]) -> None:
        self._nvml, self._handle = nvml, handle
        self._last, self._next = samples
        self._ids = {"busy_sms": nvml.NVML_GPM_METRIC_SM_UTIL, "bandwidth": nvml.NVML_GPM_METRIC_DRAM_BW_UTIL}
        nvml.nvmlGpmSampleGet(handle, self._last)

    def since(self) -> dict[str, float]:
        """Shares; what the GPU does not tell is left out."""
        nvml = self._nvml
        nvml.nvmlGpmSampleGet(self._handle, self._next)
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(self._ids)
        asked.sample1, asked.sample2 = self._last, self._next
        for metric, metric_id in zip(asked.metrics, self._ids.values(), strict=False):
            metric.metricId = metric_id
        nvml.nvmlGpmMetricsGet(asked)
        self._last, self._next = self._next, self._last
        found = zip(self._ids, asked.metrics, strict=False)
        return {name: metric.value / 100 for name, metric in found if metric.nvmlReturn == nvml.NVML_SUCCESS}


@contextmanager
def _counters(nvml: Any, handle: Any) -> Iterator[Counters | None]:
    """None where the GPU has none, or the package does not know them."""
    samples: list[Any] = []
    counters = None
    with suppress(nvml.NVMLError, AttributeError):
        if nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            samples += [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
            counters = Counters(nvml, handle, samples)
    try:
        yield counters
    finally:
        for sample in samples:
            nvml.nvmlGpmSampleFree(sample)


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
