"""Which tokens end an answer, where a model's files name several."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers

import serving
from small_model import small_model
from text.samples import byte_level_folder

# By the file that names each.
ENDS = {"tokenizer_config.json": "<|im_end|>", "generation_config.json": "<|eot_id|>", "config.json": "</s>"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer, generation_config.json and config.json each name another end."""
    model, *_ = small_model(tmp_path_factory.mktemp("ends"))
    folder = byte_level_folder(Path(model), eos_token=ENDS["tokenizer_config.json"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": _id(folder, "config.json")}))
    generation = {"eos_token_id": [_id(folder, "generation_config.json")]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture(scope="module")
def http(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    flags = ("--load-format", "dummy", "--served-model-name", "m")
    with (
        serving.running_server(tmp_path_factory.mktemp("ends-data") / "data", *flags, model=str(folder)) as server,
        httpx.Client(base_url=server.base_url, timeout=60) as session,
    ):
        yield session


def _id(folder: Path, name: str) -> int:
    return int(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(ENDS[name]))


def _answer(http: httpx.Client, token_id: int, **fields: Any) -> tuple[str, int]:
    """Why an answer that says this token again and again ends, and how long it is."""
    bias = {str(token_id): 100}
    body = {"model": "m", "prompt": [50, 60], "max_tokens": 4, "temperature": 0, "logit_bias": bias, **fields}
    answer = http.post("/v1/completions", json=body).raise_for_status().json()
    return answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("name", ENDS)
def test_each_of_them_ends_an_answer(http: httpx.Client, folder: Path, name: str) -> None:
    assert _answer(http, _id(folder, name)) == ("stop", 1)
    assert _answer(http, _id(folder, name), ignore_eos=True) == ("length", 4)


@pytest.mark.parametrize("name", ENDS)
def test_none_of_them_comes_before_min_tokens(http: httpx.Client, folder: Path, name: str) -> None:
    token_id = _id(folder, name)
    assert _answer(http, token_id, min_tokens=3) == ("stop", 4)
    assert _answer(http, token_id, min_tokens=4) == ("length", 4)
    assert _answer(http, token_id, min_tokens=3, ignore_eos=True) == ("length", 4)


@pytest.mark.parametrize("name", ENDS)
def test_nor_where_they_are_ignored(http: httpx.Client, folder: Path, name: str) -> None:
    """As in vLLM: what is ignored may come after them alone."""
    token_id = _id(folder, name)
    body = {"model": "m", "prompt": [50, 60], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    fields = {"logit_bias": {str(token_id): 100}, "skip_special_tokens": False}
    texts = [
        http.post("/v1/completions", json={**body, **fields, "min_tokens": number}).json()["choices"][0]["text"]
        for number in (0, 3, 4)
    ]
    assert [text.count(ENDS[name]) for text in texts] == [4, 1, 0]
    assert texts[1].endswith(ENDS[name])


def test_no_stop_token_comes_before_min_tokens(http: httpx.Client) -> None:
    assert _answer(http, 100, stop_token_ids=[100]) == ("stop", 1)
    assert _answer(http, 100, stop_token_ids=[100], min_tokens=2, ignore_eos=True) == ("stop", 3)


def test_no_other_does(http: httpx.Client) -> None:
    assert _answer(http, 100) == ("length", 4)
