"""What a server says of its configuration once it knows its device."""

from __future__ import annotations

import pytest

from cotenant.config import CoExecutionConfig, ModelConfig, ServerConfig
from cotenant.runtime.build import build_serving


@pytest.mark.parametrize(("policy", "is_told"), [("harli", True), ("static", True), ("adaptive", False)])
def test_a_policy_that_needs_partitions_is_told_where_there_are_none(
    policy: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    build_serving(ServerConfig(ModelConfig("tiny", device="cpu"), coexecution=CoExecutionConfig(policy)))
    assert ("training runs only while nobody asks" in caplog.text) == is_told
