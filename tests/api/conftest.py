"""One server with the built-in model for all tests of requests; a module with other flags has its own."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

import serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.RunningServer]:
    with serving.running_server(tmp_path_factory.mktemp("online") / "data") as running:
        yield running


@pytest.fixture(scope="session")
def client(server: serving.RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def http(server: serving.RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.base_url, timeout=60) as session:
        yield session
