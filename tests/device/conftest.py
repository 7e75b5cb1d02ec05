"""What tests of the device's pacing share."""

from __future__ import annotations

import pytest

from device.pacing_simulation import Simulation


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Simulation:
    return Simulation(monkeypatch)
