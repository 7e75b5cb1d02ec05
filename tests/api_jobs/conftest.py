from __future__ import annotations

import asyncio

import pytest

from cotenant.api.jobs import prepare_main, validator
from cotenant.api.jobs.prepare_main import Task
from cotenant.text.prepared_file import PreparedFile


@pytest.fixture
def _validation_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same work without a process, for tests that create many jobs; test_prepare.py has the process."""

    async def prepare(task: Task) -> tuple[PreparedFile, ...]:
        return (await asyncio.to_thread(prepare_main.run, task)).files

    monkeypatch.setattr(validator, "prepare", prepare)
