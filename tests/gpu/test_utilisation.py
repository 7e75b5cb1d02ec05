"""How busy a GPU is, as NVML tells it."""

from __future__ import annotations

import time

import pytest
import torch

from cotenant.runtime.utilisation import UtilisationSampler


def test_a_busy_gpu_is_busier_than_an_idle_one() -> None:
    pytest.importorskip("pynvml")
    device = torch.device("cuda")
    left = torch.randn(4096, 4096, device=device)
    with UtilisationSampler(device) as sampler:
        end_s = time.perf_counter() + 3.0
        while time.perf_counter() < end_s:
            left @ left
            torch.cuda.synchronize()
    figures = sampler.figures
    assert figures is not None
    assert 0.3 < figures["sm"] <= 1.0
    assert 0.0 <= figures["memory"] <= 1.0
    assert 0.0 <= figures["power_limited"] <= 1.0
    assert 10 < figures["power_w"] < 1.2 * figures["power_limit_w"]
    assert 100 < figures["sm_clock_mhz"] < 4000
    if "busy_sms" in figures:  # Hopper and later
        assert 0.3 < figures["busy_sms"] <= 1.0
        assert 0.0 < figures["bandwidth"] < 0.9
