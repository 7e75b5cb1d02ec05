"""From what the user typed to a folder and a spec."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cotenant.config import ModelConfig
from cotenant.core.errors import InvalidInputError, NotFoundError
from cotenant.models.registry import ARCHITECTURES, model_path, resolve_model
from models.support import Pair


def test_a_folder(llama: Pair) -> None:
    resolved = resolve_model(ModelConfig(str(llama.folder), served_model_names=("mine", "other")))
    assert (resolved.name, resolved.folder, resolved.spec) == ("mine", llama.folder, llama.decoder.spec)
    assert not resolved.random_weights
    assert resolve_model(ModelConfig(str(llama.folder), load_format="dummy")).random_weights


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_need_random_weights(name: str) -> None:
    resolved = resolve_model(ModelConfig(name, load_format="dummy"))
    assert (resolved.name, resolved.folder, resolved.random_weights) == (name, None, True)
    with pytest.raises(InvalidInputError, match="--load-format dummy"):
        resolve_model(ModelConfig(name))


def test_built_in_models() -> None:
    assert model_path("tiny").parts[-2:] == ("assets", "tiny")
    with pytest.raises(NotFoundError, match="built in: tiny"):
        model_path("huge")


@pytest.mark.parametrize("name", ["nonsense", "/no/such/folder", "../up", "a/b/c"])
def test_an_unknown_name_gets_the_list_of_known_ones(name: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        resolve_model(ModelConfig(name))
    for accepted in (name, "tiny", "folder", "hub id", "--load-format dummy", *ARCHITECTURES):
        assert accepted in str(caught.value)


def test_folders_without_a_usable_config(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no config\.json"):
        resolve_model(ModelConfig(str(tmp_path)))
    for content in ("{", "[]", "[" * 10**5, '{"architectures": ["LlamaForCausalLM"]}'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(InvalidInputError, match=r"config\.json"):
            resolve_model(ModelConfig(str(tmp_path)))


def test_a_length_beyond_the_models_positions(llama: Pair) -> None:
    assert resolve_model(ModelConfig(str(llama.folder), max_model_len=256)).spec == llama.decoder.spec
    with pytest.raises(InvalidInputError, match="--max-model-len 257 is more than the 256 positions"):
        resolve_model(ModelConfig(str(llama.folder), max_model_len=257))


RESOLVE = """
import sys
from cotenant.config import ModelConfig
from cotenant.core.errors import NotFoundError
from cotenant.models.registry import resolve_model
assert "torch" not in sys.modules, "the registry must not import torch"
try:
    print(resolve_model(ModelConfig(sys.argv[1])).folder)
except NotFoundError as error:
    print("NotFoundError:", error)
"""


def _resolve_offline(hub_id: str, home: Path) -> str:
    """In a process of its own: the hub client reads its settings when it is imported."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home)}
    environment.pop("HF_HUB_CACHE", None)
    return subprocess.run(
        [sys.executable, "-c", RESOLVE, hub_id], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_hub_ids(llama: Pair, tmp_path: Path) -> None:
    """From the hub client's cache when offline; otherwise a clear error."""
    stored = tmp_path / "hub" / "models--some-org--some-model"
    snapshot = stored / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(llama.folder, snapshot)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(snapshot.name)
    assert _resolve_offline("some-org/some-model", tmp_path) == str(snapshot)
    answer = _resolve_offline("some-org/absent", tmp_path)
    assert answer.startswith("NotFoundError: 'some-org/absent' is not a folder here, and it cannot be fetched")
