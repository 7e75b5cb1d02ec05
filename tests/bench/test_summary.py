"""What lists of measured values come down to."""

from __future__ import annotations

import numpy as np
import pytest

from cotenant.bench.summary import error_figures


@pytest.mark.parametrize("count", [1, 2, 20, 21, 1000])
def test_the_p95_of_errors_is_interpolated_as_all_percentiles_are(count: int) -> None:
    """Of twenty it is no longer the worst."""
    ratios = [0.01 * (value**2 % 89) for value in range(count)]
    figures = error_figures(ratios)
    assert figures["p95"] == pytest.approx(float(np.percentile(ratios, 95)), abs=1e-4)
    assert figures["iterations"] == count
