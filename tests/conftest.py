"""What holds for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How fast a machine with much to do makes examples says nothing about the code.
settings.register_profile("cotenant", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("cotenant")
