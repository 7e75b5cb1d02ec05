"""What NVML says of a GPU; tests/gpu/test_utilisation.py asks a real one."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cotenant.runtime import utilisation
from cotenant.runtime.utilisation import UtilisationSampler

BUSY = {"sm": 0.5, "memory": 0.25}


class _NvmlError(Exception):
    pass


def _stand_in(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        NVMLError=_NvmlError,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=50, memory=25),
        nvmlDeviceGetClockInfo=lambda handle, kind: 1500,
        nvmlDeviceGetPowerUsage=lambda handle: 690_000,
        nvmlDeviceGetEnforcedPowerLimit=lambda handle: 700_000,
        **more,
    )


def _refuses(handle: str) -> int:
    raise _NvmlError("not supported")


def _figures(monkeypatch: pytest.MonkeyPatch, nvml: SimpleNamespace | None) -> dict[str, float] | None:
    """Of three samples or more."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1"))
    has_sampled = threading.Semaphore(0)
    if nvml is not None:
        rates = nvml.nvmlDeviceGetUtilizationRates
        monkeypatch.setattr(
            nvml, "nvmlDeviceGetUtilizationRates", lambda handle: has_sampled.release() or rates(handle)
        )
    with UtilisationSampler(torch.device("cuda")) as sampler:
        for _ in range(4 if nvml is not None else 0):  # as the fourth begins there are three
            assert has_sampled.acquire(timeout=60)
    return sampler.figures


def test_the_power_and_what_it_does_to_the_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = iter([4, 0, *[4] * 100])
    nvml = _stand_in(
        nvmlDeviceGetCurrentClocksEventReasons=lambda handle: next(reasons), nvmlClocksEventReasonSwPowerCap=4
    )
    figures = _figures(monkeypatch, nvml)
    assert figures is not None
    assert 0.0 < figures.pop("power_limited") < 1.0
    assert figures == {**BUSY, "sm_clock_mhz": 1500.0, "power_w": 690.0, "power_limit_w": 700.0}


@pytest.mark.parametrize("more", [{"nvmlDeviceGetCurrentClocksEventReasons": _refuses}, {}], ids=["gpu", "package"])
def test_a_gpu_or_a_package_that_tells_no_more_tells_how_busy_it_is(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    assert _figures(monkeypatch, _stand_in(**more)) == BUSY


def _counting(readings: list[dict[int, float]], freed: list[int], **more: Any) -> SimpleNamespace:
    """A GPU that counts: each sample holds how many were taken before, ``readings`` what came between two of them."""
    taken: list[int] = []

    def take(handle: str, sample: SimpleNamespace) -> None:
        sample.number = len(taken)
        taken.append(sample.number)

    def tell(asked: SimpleNamespace) -> None:
        assert (asked.version, asked.sample2.number - asked.sample1.number) == (1, 1)
        reading = readings[asked.sample1.number % len(readings)]
        for metric in asked.metrics[: asked.numMetrics]:
            metric.nvmlReturn = 0 if metric.metricId in reading else 3
            metric.value = reading.get(metric.metricId, 0.0)

    given = {
        "NVML_SUCCESS": 0,
        "NVML_GPM_METRIC_SM_UTIL": 2,
        "NVML_GPM_METRIC_DRAM_BW_UTIL": 10,
        "NVML_GPM_METRICS_GET_VERSION": 1,
        "nvmlGpmQueryDeviceSupport": lambda handle: SimpleNamespace(isSupportedDevice=1),
        "nvmlGpmSampleAlloc": lambda: SimpleNamespace(number=-1),
        "nvmlGpmSampleFree": lambda sample: freed.append(sample.number),
        "nvmlGpmSampleGet": take,
        "nvmlGpmMetricsGet": tell,
        "c_nvmlGpmMetricsGet_t": lambda: SimpleNamespace(metrics=[SimpleNamespace() for _ in range(98)]),
    }
    return _stand_in(**{**given, **more})


def test_what_the_gpu_counts_of_its_sms_and_its_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utilisation, "_COUNTERS_EVERY", 1)
    freed: list[int] = []
    figures = _figures(monkeypatch, _counting([{2: 40.0, 10: 70.0}], freed))
    assert figures == {**BUSY, "busy_sms": 0.4, "bandwidth": 0.7}
    assert len(freed) == 2
    assert _figures(monkeypatch, _counting([{2: 40.0}], freed)) == {**BUSY, "busy_sms": 0.4}
    none = {"nvmlGpmQueryDeviceSupport": lambda handle: SimpleNamespace(isSupportedDevice=0)}
    assert _figures(monkeypatch, _counting([{2: 40.0}], freed, **none)) == BUSY


def test_a_gpu_whose_counters_may_not_be_read_tells_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utilisation, "_COUNTERS_EVERY", 1)

    def refuses(*asked: Any) -> None:
        raise _NvmlError("no permission")

    freed: list[int] = []
    for name, num_freed in (("nvmlGpmMetricsGet", 2), ("nvmlGpmSampleGet", 2), ("nvmlGpmQueryDeviceSupport", 0)):
        freed.clear()
        assert _figures(monkeypatch, _counting([{2: 40.0}], freed, **{name: refuses})) == BUSY
        assert len(freed) == num_freed


def test_nothing_where_there_is_no_gpu_or_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with UtilisationSampler(torch.device("cpu")) as sampler:
        pass
    assert sampler.figures is None
    assert _figures(monkeypatch, None) is None
