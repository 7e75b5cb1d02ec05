"""What a GPU tells of itself."""

from __future__ import annotations

import pytest

from cotenant.device import create_device
from cotenant.predictor.roofline import RATES, rates_by_clocks


def test_rates_by_clocks_come_near_those_that_were_measured() -> None:
    device = create_device("cuda")
    if device.name not in RATES:
        pytest.skip(f"the rates of {device.name} are not known")
    if device.clocks is None:
        pytest.skip("this torch tells no clocks")
    capability, sm_hz, bytes_per_s = device.clocks
    rates = rates_by_clocks(capability, device.num_multiprocessors or 0, sm_hz, bytes_per_s)
    assert rates is not None
    assert rates.flops == pytest.approx(RATES[device.name].flops, rel=0.15)
    assert rates.bytes_per_s == pytest.approx(RATES[device.name].bytes_per_s, rel=0.15)
