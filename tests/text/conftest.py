from __future__ import annotations

from pathlib import Path

import pytest

from text.samples import byte_level_folder, sentencepiece_folder, unigram_folder


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level_folder(tmp_path_factory.mktemp("byte-level"))


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentencepiece_folder(tmp_path_factory.mktemp("sentencepiece"))


@pytest.fixture(scope="session")
def unigram(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unigram_folder(tmp_path_factory.mktemp("unigram"))
