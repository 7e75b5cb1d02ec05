"""What holds for all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from cotenant.processes import importing

# How fast a machine with much to do makes examples says nothing about the code.
settings.register_profile("cotenant", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("cotenant")

# Container images often forbid bytecode files. The tests start a few hundred processes, each of which would compile the
# package again, and each of pytest's workers all tests as well.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collecting imports all tests and what they test."""
    with importing():
        yield
