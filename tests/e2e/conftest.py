"""A server for tests of bad input, and the promise that nothing disturbs it. Files with a server of their own call it
``server`` too, which hides this one."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from e2e.refusals import FLAGS, HEADERS, greedy_answer
from serving import RunningServer, running_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("bad_input") / "data", *FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.base_url, headers=HEADERS, timeout=120) as session:
        yield session


@pytest.fixture(scope="module")
def before(server: RunningServer, client: httpx.Client) -> tuple[str, int | None]:
    """The answer to a greedy request, and the worker that gave it."""
    answer = greedy_answer(client)
    assert answer
    return answer, server.worker_pid()


@pytest.fixture
def undisturbed(server: RunningServer, client: httpx.Client, before: tuple[str, int | None]) -> Iterator[None]:
    """After the test a greedy request gets the very same answer from the very same worker."""
    yield
    assert (greedy_answer(client), server.worker_pid()) == before
    assert "Traceback" not in server.log
