"""What NVML says of a GPU; tests/gpu/test_utilisation.py asks a real one."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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


def _figures(monkeypatch: pytest.MonkeyPatch, nvml: SimpleNamespace) -> dict[str, float] | None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1"))
    with UtilisationSampler(torch.device("cuda")) as sampler:
        time.sleep(0.35)
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


def test_nothing_where_there_is_no_gpu_or_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with UtilisationSampler(torch.device("cpu")) as sampler:
        pass
    assert sampler.figures is None
    assert _figures(monkeypatch, None) is None  # type: ignore[arg-type]
