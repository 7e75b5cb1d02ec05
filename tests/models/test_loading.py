"""Weights from safetensors, whole or in shards, and what is said about checkpoints that do not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cotenant.core.errors import CotenantError, InvalidInputError, NotFoundError
from cotenant.models.decoder import Decoder
from cotenant.models.loading import load_decoder
from cotenant.models.registry import ARCHITECTURES, ResolvedModel, read_spec
from cotenant.models.weights import allocate, targets
from models import support
from models.support import Pair, tokens

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(llama: Pair, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(llama.folder, tmp_path / "copy"))


def _logits(decoder: Decoder) -> torch.Tensor:
    return decoder.logits(decoder.forward(support.training_batch([tokens(10)])))


def _edit(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / SINGLE)
    edit(tensors)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


def test_shards(pair: Pair, tmp_path: Path) -> None:
    pair.reference.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(_logits(support.load(tmp_path)), _logits(pair.decoder))
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(NotFoundError, match=shard.name):
        support.load(tmp_path)


def test_checkpoint_in_another_dtype(llama: Pair, folder: Path) -> None:
    _edit(folder, lambda t: t.update({name: tensor.double() for name, tensor in t.items()}))
    assert torch.equal(_logits(support.load(folder)), _logits(llama.decoder))


def test_redundant_tensors_are_ignored(pair_of: Callable[[str], Pair], tmp_path: Path) -> None:
    """The head of a model that ties it, and the frequencies that old checkpoints carry."""
    tied = pair_of("qwen2")
    shutil.copytree(tied.folder, tmp_path, dirs_exist_ok=True)
    _edit(
        tmp_path,
        lambda t: t.update(
            {
                "lm_head.weight": t["model.embed_tokens.weight"].clone(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
            }
        ),
    )
    assert torch.equal(_logits(support.load(tmp_path)), _logits(tied.decoder))


@pytest.mark.parametrize("edit", [lambda head: head[-1].neg_(), lambda head: head.resize_(support.VOCAB_SIZE - 1, 48)])
def test_a_head_of_its_own_is_not_tied(
    pair_of: Callable[[str], Pair], tmp_path: Path, edit: Callable[[torch.Tensor], Any]
) -> None:
    """transformers does not tie it either, whatever the config says."""
    shutil.copytree(pair_of("qwen2").folder, tmp_path, dirs_exist_ok=True)

    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        edit(tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone()))

    _edit(tmp_path, add_head)
    with pytest.raises(InvalidInputError, match=r"lm_head\.weight is not .* set that to false") as caught:
        support.load(tmp_path)
    assert str(tmp_path / SINGLE) in str(caught.value)


def test_a_head_of_its_own_is_used_once_the_config_says_so(pair_of: Callable[[str], Pair], tmp_path: Path) -> None:
    shutil.copytree(pair_of("qwen2").folder, tmp_path, dirs_exist_ok=True)
    _edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].flip(0)}))
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = _logits(pair_of("qwen2").decoder).flip(-1)
    assert torch.allclose(_logits(support.load(tmp_path)), expected, atol=1e-5)


_Q1 = "model.layers.1.self_attn.q_proj.weight"


def _in_two(folder: Path) -> tuple[Path, Path]:
    """Make two shards of the one file."""
    paths = folder / "one.safetensors", folder / "two.safetensors"
    tensors = load_file(folder / SINGLE)
    for path, is_first in zip(paths, (True, False), strict=True):
        part = {name: tensor for name, tensor in tensors.items() if (name == _Q1) == is_first}
        save_file(part, path, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"weight_map": {_Q1: paths[0].name, "lm_head.weight": paths[1].name}}))
    (folder / SINGLE).unlink()
    return paths


def _repeat_in_other_file(folder: Path, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
    one, two = _in_two(folder)
    save_file(load_file(two) | {_Q1: edit(load_file(one)[_Q1])}, two, metadata={"format": "pt"})


def test_equal_copies_in_two_files_are_one_tensor(llama: Pair, folder: Path) -> None:
    """As transformers has it."""
    _repeat_in_other_file(folder, torch.clone)
    assert torch.equal(_logits(support.load(folder)), _logits(llama.decoder))


@pytest.mark.parametrize(
    "edit",
    [
        lambda tensor: tensor.index_fill(0, torch.tensor(63), 0.0),
        lambda tensor: tensor.flatten()[:-1].clone(),
        lambda tensor: tensor.half(),
        lambda tensor: tensor.sum(),
    ],
)
def test_copies_that_differ_in_anything_are_refused(folder: Path, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """transformers takes the last file's, the index names the first."""
    _repeat_in_other_file(folder, edit)
    message = f"holds {_Q1} twice, in one.safetensors and in two.safetensors, and they differ: take"
    with pytest.raises(InvalidInputError, match=message):
        support.load(folder)


def _make_folder_of_shard(folder: Path) -> None:
    _, two = _in_two(folder)
    two.unlink()
    two.mkdir()


def _repeat_in_index(folder: Path) -> None:
    _in_two(folder)
    repeated = (folder / INDEX).read_text().replace("}", f', "{_Q1}": "two.safetensors"}}', 1)
    (folder / INDEX).write_text(repeated)


def _repeat_in_header(folder: Path) -> None:
    """With another shape at first: the last entry fits."""
    content = (folder / SINGLE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, tensors = content[8 : 8 + length], content[8 + length :]
    entry = json.dumps(json.loads(header)[_Q1] | {"shape": [48, 64]})
    header = f'{{"{_Q1}": {entry}, '.encode() + header[1:]
    (folder / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + tensors)


BAD_FOLDERS: dict[str, tuple[Callable[[Path], Any], type[CotenantError], str]] = {
    "missing": (
        lambda f: _edit(f, lambda t: (t.pop(_Q1), t.pop("lm_head.weight"))),
        InvalidInputError,
        f"lacks {_Q1}, lm_h",
    ),
    "unexpected": (
        lambda f: _edit(f, lambda t: t.update({"model.layers.1.self_attn.q_proj.bias": torch.zeros(64)})),
        InvalidInputError,
        "no place for: model.layers.1.self_attn.q_proj.bias",
    ),
    "shape": (
        lambda f: _edit(f, lambda t: t.update({_Q1: torch.zeros(64, 47)})),
        InvalidInputError,
        rf"{SINGLE}: {_Q1} has shape \[64, 47\], but config.json makes it \[64, 48\]",
    ),
    "quantised": (
        lambda f: _edit(f, lambda t: t.update({_Q1: t[_Q1].to(torch.int8)})),
        InvalidInputError,
        f"{SINGLE}: {_Q1} is stored as I8",
    ),
    "torn": (
        lambda f: (f / SINGLE).write_bytes((f / SINGLE).read_bytes()[:-1000]),
        InvalidInputError,
        f"{SINGLE} is not a readable",
    ),
    "twice-in-header": (
        _repeat_in_header,
        InvalidInputError,
        f"{SINGLE} is not a readable safetensors file: .*it names {_Q1} 2 times",
    ),
    "no-weights": (lambda f: (f / SINGLE).unlink(), NotFoundError, f"neither {SINGLE} nor {INDEX}"),
    "broken-index": (
        lambda f: ((f / SINGLE).unlink(), (f / INDEX).write_text("{}")),
        InvalidInputError,
        f"{INDEX} cannot be read",
    ),
    "nested-index": (
        lambda f: ((f / SINGLE).unlink(), (f / INDEX).write_text("[" * 10**5)),
        InvalidInputError,
        f"{INDEX} cannot be read",
    ),
    "index-without-names": (
        lambda f: ((f / SINGLE).unlink(), (f / INDEX).write_text('{"weight_map": {"a": 1, "b": "c"}}')),
        InvalidInputError,
        f"{INDEX}: weight_map must name a file for each tensor, not 1",
    ),
    "twice-in-index": (_repeat_in_index, InvalidInputError, f"{INDEX} cannot be read: .*it names {_Q1} 2 times"),
    "folder": (
        _make_folder_of_shard,
        NotFoundError,
        f"{INDEX} names files that are not there, or are none: two.safetensors",
    ),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_bad_checkpoints_are_refused(folder: Path, name: str) -> None:
    spoil, kind, message = BAD_FOLDERS[name]
    spoil(folder)
    with pytest.raises(kind, match=message) as caught:
        support.load(folder)
    assert str(folder) in str(caught.value)


def test_a_long_list_of_tensors_is_cut(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 5}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInputError, match=r"model\.layers\.3\..* and 13 more"):
        support.load(folder)


def test_random_weights_depend_on_the_seed(llama: Pair) -> None:
    spec = read_spec(llama.folder)

    def load(seed: int) -> Decoder:
        return load_decoder(
            ResolvedModel("m", llama.folder, spec, random_weights=True), support.CPU, torch.float32, seed
        )

    assert torch.equal(_logits(load(1)), _logits(load(1)))
    assert not torch.equal(_logits(load(1)), _logits(load(2)))
    assert not torch.equal(_logits(load(1)), _logits(llama.decoder))
    assert abs(load(1).weights.head.std() - 0.02) < 0.001


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.2-1b", 1_235_814_400),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_architectures_have_the_published_sizes(name: str, num_parameters: int) -> None:
    spec = ARCHITECTURES[name]
    places = targets(spec, allocate(spec, torch.device("meta"), torch.bfloat16))
    assert sum(torch.Size(place.shape).numel() for place in places.values()) == num_parameters
