"""A linear model learned one measurement at a time.

Recursive least squares with forgetting: LLMStation section 4.2 uses linear models over simple features; learning them
online replaces its offline profiling runs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_FORGETTING = 0.995
_PRIOR_VARIANCE = 1e4
_MAX_VARIANCE = 1e6


class OnlineLinearModel:
    """Predicts ``weights · features``. ``scales`` bring each feature near 1: the update stays well conditioned."""

    def __init__(self, scales: tuple[float, ...]) -> None:
        self._scales = np.asarray(scales, dtype=np.float64)  # [features]
        self._weights: npt.NDArray[np.float64] = np.zeros(len(scales))
        self._covariance: npt.NDArray[np.float64] = np.eye(len(scales)) * _PRIOR_VARIANCE
        self.num_samples = 0

    @property
    def ready(self) -> bool:
        """True once there were more measurements than weights."""
        return self.num_samples > len(self._scales)

    def predict(self, features: tuple[float, ...]) -> float:
        """The estimate, in the unit of the targets; never negative."""
        return max(0.0, float(self._weights @ (np.asarray(features) / self._scales)))

    def update(self, features: tuple[float, ...], target: float) -> None:
        """Learn from one measurement. Older ones count less and less."""
        x = np.asarray(features) / self._scales  # [features]
        gain = self._covariance @ x
        gain /= _FORGETTING + x @ gain
        self._weights += gain * (target - float(self._weights @ x))
        self._covariance = (self._covariance - np.outer(gain, x @ self._covariance)) / _FORGETTING
        # Forgetting inflates the covariance along directions that no measurement touches; keep it bounded.
        trace = float(np.trace(self._covariance))
        if trace > _MAX_VARIANCE * len(x):
            self._covariance *= _MAX_VARIANCE * len(x) / trace
        self.num_samples += 1
