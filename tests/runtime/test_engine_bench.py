"""The least time that a step could take, by what it has to read."""

from __future__ import annotations

import pytest

from cotenant.config import BatchConfig, ModelConfig, ServerConfig
from cotenant.runtime.build import build_serving
from cotenant.runtime.engine_bench import Ceilings, EngineBench, spread


def test_weights_of_layers_count_as_they_are_stored() -> None:
    """One byte each with fp8, which a CPU cannot run; the others as the model's dtype says."""
    serving = build_serving(ServerConfig(model=ModelConfig("tiny", device="cpu"), batch=BatchConfig()))
    by_bytes = Ceilings(copy_gb_s=1.0, matmul_tflop_s=1e9)
    whole_ms, fp8_ms = (EngineBench(serving, by_bytes, each).floor_ms(1, 48, 1) for each in (4, 1))
    num_weights = serving.resolved.spec.layer_parameters
    assert whole_ms - fp8_ms == pytest.approx(3 * num_weights / 1e6)


def test_a_spread_has_the_percentiles_of_what_was_measured() -> None:
    assert spread(range(1, 12)) == {"p50": 6, "p10": 2, "p90": 10, "p99": 10.9, "max": 11}
    assert set(spread([3.0]).values()) == {3.0}
