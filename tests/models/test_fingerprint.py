"""A model is the same wherever it lies, and another where a weight differs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cotenant.config import ModelConfig
from cotenant.core.errors import CotenantError
from cotenant.models.fingerprint import fingerprint
from cotenant.models.registry import model_path, resolve_model


def of(model: str | Path, load_format: str = "auto", seed: int = 0, dtype: str = "auto") -> str:
    config = ModelConfig(str(model), load_format=load_format, seed=seed, dtype=dtype)
    return fingerprint(resolve_model(config), config)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_path("tiny"), tmp_path / "copy"))


def test_a_copy_is_the_same_model(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "transformers_version": "0", "_name_or_path": "x"}))
    assert of(copy) == of("tiny") == of("tiny", dtype="bfloat16", seed=3)


def test_other_weights_are_another_model(copy: Path) -> None:
    path = copy / "model.safetensors"
    weights = load_file(path)
    prints = {of(copy)}
    for name in ("model.norm.weight", "model.layers.1.self_attn.q_proj.weight"):
        changed = {**weights, name: weights[name] + 1}
        save_file(changed, path, metadata={"format": "pt"})
        prints.add(of(copy))
    (copy / "config.json").write_text((copy / "config.json").read_text().replace("{", '{"more": 1,', 1))
    prints.add(of(copy))
    assert len(prints) == 4


def test_random_weights_are_their_seed(copy: Path) -> None:
    assert of(copy, "dummy", 1) == of("tiny", "dummy", 1)
    names = ("tiny", "llama-3.1-8b", "qwen3-8b")
    prints = {of(name, "dummy", seed) for name in names for seed in (1, 2)} | {of("tiny")}
    assert len(prints) == 7


def test_what_cannot_be_loaded_has_none(copy: Path) -> None:
    path = copy / "model.safetensors"
    whole = path.read_bytes()
    for content in (b"", b"\xff" * 100, whole[:100], (8).to_bytes(8, "little") + b'["list"]'):
        path.write_bytes(content)
        with pytest.raises(CotenantError, match=r"model\.safetensors is not a readable safetensors file"):
            of(copy)
    for content, message in (
        (whole[:-1000], r"it is cut short: it holds \d+ of the"),
        (whole + b"x", "holds more than"),
    ):
        path.write_bytes(content)
        with pytest.raises(CotenantError, match=message):
            of(copy)
    path.unlink()
    with pytest.raises(CotenantError, match="holds neither"):
        of(copy)


def test_tensors_of_no_bytes(copy: Path) -> None:
    save_file({"empty": torch.empty(0)}, copy / "model.safetensors")
    assert of(copy)
