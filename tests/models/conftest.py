from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch

from models import support


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], support.Pair]:
    """Models by the names of ``support.MODELS``, each made once."""
    return cache(lambda name: support.make_pair(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(params=support.MODELS)
def pair(request: pytest.FixtureRequest, pair_of: Callable[[str], support.Pair]) -> support.Pair:
    """Each model in turn."""
    return pair_of(request.param)


@pytest.fixture(scope="session")
def llama(pair_of: Callable[[str], support.Pair]) -> support.Pair:
    return pair_of("llama")
