"""Adapters: PEFT's format both ways, several adapters in one batch, and folders that must be refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from cotenant.core.errors import InvalidInputError
from cotenant.core.job import LINEAR_MODULES
from cotenant.models import adapter_files
from cotenant.models.finite import first_not_finite
from cotenant.models.lora import LoraAdapter, read_adapter, save_adapter
from cotenant.models.peft_config import read_config
from cotenant.models.safetensors_file import read_header, read_whole
from cotenant.models.spec import ModelSpec
from models import support
from models.support import PagedCache, Pair, tokens

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def _load(folder: Path, spec: ModelSpec, max_rank: int = 64) -> LoraAdapter:
    return read_adapter(folder, spec, max_rank)


def _serve(folder: Path, spec: ModelSpec) -> LoraAdapter:
    return _load(folder, spec).for_serving(support.CPU, torch.float32)


def _peft_logits(pair: Pair, folder: Path, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """By a fresh base model with the adapter of a folder."""
    base = type(pair.reference).from_pretrained(pair.folder)
    model = PeftModel.from_pretrained(base, folder).eval()
    return torch.cat([pair.reference_logits(sequence, model) for sequence in sequences])


def _our_logits(pair: Pair, adapter: LoraAdapter, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    with torch.no_grad():
        return pair.decoder.logits(pair.decoder.forward(support.training_batch(sequences, adapter)))


def _assert_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert (ours - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": LINEAR_MODULES},
        {"target_modules": ("k_proj",), "r": 1, "alpha": 0.75},
        {"target_modules": ("o_proj", "up_proj"), "r": 6, "alpha": 10, "use_rslora": True, "dropout": 0.3},
    ],
    ids=["all", "one", "rslora"],
)
def test_peft_loads_what_we_save(pair: Pair, tmp_path: Path, options: dict[str, Any]) -> None:
    adapter = support.random_adapter(pair.decoder, 1, **options)
    save_adapter(adapter, tmp_path, str(pair.folder))
    sequences = [tokens(14), tokens(9)]
    expected = _peft_logits(pair, tmp_path, sequences)
    assert (expected - torch.cat([pair.reference_logits(s) for s in sequences])).abs().max() > 0.1
    _assert_close(_our_logits(pair, adapter, sequences), expected)
    _assert_close(_our_logits(pair, _serve(tmp_path, pair.decoder.spec), sequences), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"r": 8, "lora_alpha": 4, "target_modules": "all-linear"},
        {"r": 3, "lora_alpha": 5, "target_modules": ["self_attn.q_proj", "down_proj"], "use_rslora": True},
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": r".*\.(v_proj|gate_proj|up_proj)",
            "rank_pattern": {"layers.1.self_attn.v_proj": 2, "gate_proj": 7},
            "alpha_pattern": {"up_proj": 20, r"layers\.(0|2)\.mlp\.gate_proj": 3},
        },
        {"r": 2, "target_modules": ["q_proj", "k_proj", "v_proj"], "layers_to_transform": [0, 2]},
        {"r": 2, "target_modules": ["q_proj", "o_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
        {"r": 2, "target_modules": ["q_proj", "model.layers.2.self_attn.o_proj"], "layers_to_transform": [0]},
    ],
    ids=["all-linear", "ends-of-names", "patterns", "layers", "excluded", "layers-and-a-name"],
)
def test_we_load_what_peft_saves_and_save_it_again(llama: Pair, tmp_path: Path, options: dict[str, Any]) -> None:
    torch.manual_seed(4)
    base = type(llama.reference).from_pretrained(llama.folder)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)).eval()
    model.save_pretrained(tmp_path / "theirs")
    sequences = [tokens(21), tokens(5)]
    expected = torch.cat([llama.reference_logits(sequence, model) for sequence in sequences])
    adapter = _load(tmp_path / "theirs", llama.decoder.spec)
    _assert_close(_our_logits(llama, adapter, sequences), expected)
    save_adapter(adapter, tmp_path / "ours", str(llama.folder))
    _assert_close(_peft_logits(llama, tmp_path / "ours", sequences), expected)
    _assert_close(_our_logits(llama, _serve(tmp_path / "ours", llama.decoder.spec), sequences), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{"lora_alpha": 32, "r": 12}, {"lora_alpha": 16, "r": 8, "use_rslora": True}])
def test_a_file_in_half_precision_is_scaled_as_in_peft(
    llama: Pair, tmp_path: Path, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """In float32, however the file has rounded its matrices: by no power of two, the product would be rounded again."""
    torch.manual_seed(5)
    base = type(llama.reference).from_pretrained(llama.folder)
    config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, target_modules="all-linear", **options)
    get_peft_model(base, config).save_pretrained(tmp_path)
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(tmp_path / WEIGHTS).items()}
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    sequences = [tokens(21), tokens(5)]
    expected = _peft_logits(llama, tmp_path, sequences)
    _assert_close(_our_logits(llama, _serve(tmp_path, llama.decoder.spec), sequences), expected)


def test_saved_files_hold_what_peft_and_vllm_expect(llama: Pair, tmp_path: Path) -> None:
    adapter = support.random_adapter(llama.decoder, 1, target_modules=("v_proj", "q_proj"), r=4, alpha=8.0)
    save_adapter(adapter, tmp_path / "made" / "here", "some/base")
    config = json.loads((tmp_path / "made" / "here" / CONFIG).read_text())
    expected = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "some/base",
        "inference_mode": True,
        "bias": "none",
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": False,
        "lora_dropout": 0.0,
        "target_modules": ["q_proj", "v_proj"],
        "modules_to_save": None,
    }
    assert expected.items() <= config.items()
    assert isinstance(config["lora_alpha"], int)
    tensors = load_file(tmp_path / "made" / "here" / WEIGHTS)
    prefix = "base_model.model.model.layers"
    assert set(tensors) == {
        f"{prefix}.{layer}.self_attn.{module}.lora_{matrix}.weight"
        for layer in range(3)
        for module in ("q_proj", "v_proj")
        for matrix in "AB"
    }
    assert tensors[f"{prefix}.0.self_attn.v_proj.lora_A.weight"].shape == (4, 48)
    assert tensors[f"{prefix}.0.self_attn.v_proj.lora_B.weight"].shape == (32, 4)


def _adapters(decoder: Any, make: Callable[[LoraAdapter], LoraAdapter]) -> list[LoraAdapter]:
    options: list[dict[str, Any]] = [
        {"r": 2, "target_modules": LINEAR_MODULES},
        {"r": 7, "alpha": 3.0, "target_modules": ("o_proj", "gate_proj")},
        {"r": 5, "target_modules": ("q_proj", "k_proj", "down_proj"), "use_rslora": True},
    ]
    return [make(support.random_adapter(decoder, seed, **option)) for seed, option in enumerate(options)]


def test_a_mixed_batch_gives_each_its_own_result(pair: Pair) -> None:
    """Decodes, prompt chunks and a training segment in one batch, base and three adapters side by side."""
    served = _adapters(pair.decoder, lambda adapter: adapter.for_serving(support.CPU, torch.float32))
    trained = support.random_adapter(pair.decoder, 9, target_modules=LINEAR_MODULES)
    cache = PagedCache(pair.decoder)
    texts = [tokens(length, seed=7) for length in (12, 20, 15, 31, 6)]
    owners = [served[0], None, served[1], served[2], served[0]]
    one, two, three, four, five = (cache.add(text, owner) for text, owner in zip(texts, owners, strict=True))
    cache.run([(one, 11), (two, 19), (three, 14), (four, 3)])
    examples = [tokens(8, seed=8), tokens(13, seed=8)]
    batch = cache.batch([[(one, 1), (two, 1), (three, 1)], [(four, 28), (five, 6)]], examples, trained)
    with torch.no_grad():
        logits = pair.decoder.logits(pair.decoder.forward(batch, cache.cache))
    alone = [
        _our_logits(pair, owner, [text]) if owner else pair.reference_logits(text)
        for text, owner in zip(texts, owners, strict=True)
    ]
    expected = [
        alone[0][11:],
        alone[1][19:],
        alone[2][14:],
        alone[3][3:],
        alone[4],
        _our_logits(pair, trained, examples),
    ]
    _assert_close(logits, torch.cat(expected))


def test_adapters_alone_equal_peft_through_the_paged_cache(llama: Pair, tmp_path: Path) -> None:
    for index, adapter in enumerate(_adapters(llama.decoder, lambda adapter: adapter)):
        save_adapter(adapter, tmp_path / str(index), str(llama.folder))
        text = tokens(18, seed=index)
        cache = PagedCache(llama.decoder)
        sequence = cache.add(text, _serve(tmp_path / str(index), llama.decoder.spec))
        logits = [cache.run([(sequence, 10)])] + [cache.run([(sequence, 1)]) for _ in range(8)]
        _assert_close(torch.cat(logits), _peft_logits(llama, tmp_path / str(index), [text]))


def test_a_snapshot_does_not_change_with_its_original(llama: Pair) -> None:
    adapter = support.random_adapter(llama.decoder, 1)
    before = _our_logits(llama, adapter, [tokens(9)])
    copies = [adapter.snapshot(), adapter.for_serving(support.CPU, torch.float32)]
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.mul_(2)
    assert (_our_logits(llama, adapter, [tokens(9)]) - before).abs().max() > 0.01
    for copy in copies:
        assert not any(parameter.requires_grad for parameter in copy.parameters())
        _assert_close(_our_logits(llama, copy, [tokens(9)]), before)


def test_initial_values_are_pefts(llama: Pair) -> None:
    """A is uniform with PEFT's bound, B is zero, and the same seed gives the same bits."""
    options: dict[str, Any] = {"r": 32, "alpha": 8.0, "target_modules": ("down_proj",)}
    first = LoraAdapter.trainable(llama.decoder.spec, seed=1, **options)
    model = get_peft_model(
        type(llama.reference).from_pretrained(llama.folder), LoraConfig(r=32, target_modules=["down_proj"])
    )
    theirs = torch.cat([p for name, p in model.named_parameters() if "lora_A" in name])
    ours = torch.cat([a for a, _ in first.weights.values()])
    assert ours.shape == theirs.shape
    bound = 80**-0.5
    assert 0.98 * bound < ours.abs().max() < bound
    assert abs(ours.std() / theirs.std() - 1) < 0.03
    assert all(not b.any() for _, b in first.weights.values())
    again = LoraAdapter.trainable(llama.decoder.spec, seed=1, **options)
    assert all(map(torch.equal, first.parameters(), again.parameters()))
    other = LoraAdapter.trainable(llama.decoder.spec, seed=2, **options)
    assert not torch.equal(first.parameters()[0], other.parameters()[0])


def test_trainable_refuses_unknown_modules(llama: Pair) -> None:
    for modules in (("q_proj", "lm_head"), ()):
        with pytest.raises(InvalidInputError, match="target_modules"):
            LoraAdapter.trainable(llama.decoder.spec, r=2, alpha=4, target_modules=modules, seed=0)


def _edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def _edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)


_Q0 = "base_model.model.model.layers.0.self_attn.q_proj"

BAD_FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "dora": (lambda f: _edit_config(f, use_dora=True), f"{CONFIG}.*use_dora"),
    "bias": (lambda f: _edit_config(f, bias="lora_only"), f"{CONFIG}.*bias 'lora_only'"),
    "modules-to-save": (lambda f: _edit_config(f, modules_to_save=["lm_head"]), f"{CONFIG}.*modules_to_save"),
    "pissa": (lambda f: _edit_config(f, init_lora_weights="pissa_niter_4"), f"{CONFIG}.*pissa"),
    "other-kind": (lambda f: _edit_config(f, peft_type="IA3"), f"{CONFIG}.*'IA3'"),
    "unknown-target": (lambda f: _edit_config(f, target_modules=["q_proj", "lm_head"]), f"{CONFIG}.*lm_head"),
    "no-target": (lambda f: _edit_config(f, target_modules="nothing"), f"{CONFIG}.*selects none"),
    "broken-pattern": (lambda f: _edit_config(f, target_modules="(q_proj"), f"{CONFIG}.*wrong kind"),
    "broken-rank-pattern": (lambda f: _edit_config(f, rank_pattern={"(q_proj": 3}), f"{CONFIG}.*wrong kind"),
    "flags-inside-a-pattern": (lambda f: _edit_config(f, alpha_pattern={"(?i)Q_PROJ": 3}), f"{CONFIG}.*wrong kind"),
    "slow-target": (lambda f: _edit_config(f, target_modules="(|)" * 30 + "!"), f"{CONFIG}.*takes over 1 s"),
    "slow-pattern": (lambda f: _edit_config(f, rank_pattern={"(.+)+!": 4}), f"{CONFIG}.*takes over 1 s"),
    "too-many-patterns": (
        lambda f: _edit_config(f, rank_pattern={f"layers.{layer}.q_proj": 4 for layer in range(4097)}),
        f"{CONFIG}.*more than 4096 keys",
    ),
    "nested-target": (
        lambda f: _edit_config(f, target_modules="(" * 5000 + ")" * 5000),
        f"{CONFIG}.*nested too deeply",
    ),
    "nested-pattern": (
        lambda f: _edit_config(f, rank_pattern={"(" * 5000 + ")" * 5000: 4}),
        f"{CONFIG}.*nested too deeply",
    ),
    "endless-target": (lambda f: _edit_config(f, target_modules="a{99999999999}"), f"{CONFIG}.*wrong kind"),
    "huge-alpha": (lambda f: _edit_config(f, lora_alpha=10**400), f"{CONFIG}.*wrong kind"),
    "alpha-nan": (lambda f: _edit_config(f, lora_alpha=float("nan")), f"{CONFIG}.*must be finite"),
    "infinite-alpha": (lambda f: _edit_config(f, alpha_pattern={"q_proj": float("inf")}), f"{CONFIG}.*must be finite"),
    "infinite-layer": (lambda f: _edit_config(f, layers_to_transform=[float("inf")]), f"{CONFIG}.*wrong kind"),
    "no-rank": (lambda f: _edit_config(f, r="absent"), f"{CONFIG} lacks 'r'"),
    "silly-rank": (lambda f: _edit_config(f, r="four"), f"{CONFIG}.*four"),
    "other-rank": (lambda f: _edit_config(f, r=3), rf"{WEIGHTS}.*{_Q0}.*\[4, 48\].*\[3, 48\]"),
    "rank-over-limit": (lambda f: _edit_config(f, r=65), f"{CONFIG}.*rank 65.*--max-lora-rank"),
    "no-config": (lambda f: (f / CONFIG).unlink(), f"holds no {CONFIG}"),
    "config-not-json": (lambda f: (f / CONFIG).write_text("{"), f"{CONFIG} cannot be read"),
    "nested-config": (lambda f: (f / CONFIG).write_text("[" * 10**5), f"{CONFIG} cannot be read"),
    "config-a-list": (lambda f: (f / CONFIG).write_text("[]"), f"{CONFIG} does not hold"),
    "no-weights": (lambda f: (f / WEIGHTS).unlink(), f"holds no {WEIGHTS}"),
    "torn-weights": (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-100]), f"{WEIGHTS} is not"),
    "cut-weights": (
        lambda f: os.truncate(f / WEIGHTS, 4000),
        f"{WEIGHTS} is not a readable safetensors file: it is cut short",
    ),
    "headless-weights": (lambda f: os.truncate(f / WEIGHTS, 100), f"{WEIGHTS} is not.*it ends within its header"),
    "longer-weights": (lambda f: os.truncate(f / WEIGHTS, 10**6), f"{WEIGHTS} is not.*more than its header names"),
    "nested-header": (
        lambda f: (f / WEIGHTS).write_bytes((10**5).to_bytes(8, "little") + b"[" * 10**5),
        f"{WEIGHTS} is not.*its header is not one of tensors",
    ),
    "strange-header": (
        lambda f: (f / WEIGHTS).write_bytes((12).to_bytes(8, "little") + b'{"a": [1, 2]}'[:12]),
        f"{WEIGHTS} is not.*its header is not one of tensors",
    ),
    "repeated-name": (
        lambda f: (f / WEIGHTS).write_bytes((18).to_bytes(8, "little") + b'{"a": {}, "a": {}}'),
        f"{WEIGHTS} is not.*it names a 2 times",
    ),
    "endless-header": (lambda f: (f / WEIGHTS).write_bytes(b"\xff" * 9), f"{WEIGHTS} is not.*its header is too long"),
    "empty-weights": (lambda f: (f / WEIGHTS).write_bytes(b""), f"{WEIGHTS} is not"),
    "missing-tensor": (lambda f: _edit_weights(f, lambda t: t.pop(f"{_Q0}.lora_B.weight")), f"lacks {_Q0}.lora_B"),
    "extra-tensor": (
        lambda f: _edit_weights(f, lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(2)})),
        f"{WEIGHTS}.*lm_head",
    ),
    "wrong-shape": (
        lambda f: _edit_weights(f, lambda t: t.update({f"{_Q0}.lora_B.weight": torch.zeros(63, 4)})),
        rf"{WEIGHTS}.*{_Q0}.*\[63, 4\].*\[64, 4\]",
    ),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"])
def test_weights_that_are_not_finite_are_refused(llama: Pair, tmp_path: Path, dtype: str) -> None:
    """Wherever they stand; the largest finite ones are not."""
    kind, name = getattr(torch, dtype), f"{_Q0}.lora_B.weight"
    save_adapter(support.random_adapter(llama.decoder, 0), tmp_path, "base")
    _edit_weights(tmp_path, lambda tensors: tensors.update({each: t.to(kind) for each, t in tensors.items()}))
    shape = load_file(tmp_path / WEIGHTS)[name].shape
    values = [torch.nan, -torch.nan] + ([] if dtype == "float8_e4m3fn" else [torch.inf, -torch.inf])
    for value, place in zip(values, ((0, 0), (63, 3), (5, 1), (63, 0)), strict=False):
        largest = torch.full(shape, torch.finfo(kind).max, dtype=torch.float64)
        _edit_weights(tmp_path, lambda tensors, b=largest: tensors.update({name: b.to(kind)}))
        _load(tmp_path, llama.decoder.spec)
        largest[place] = value
        _edit_weights(tmp_path, lambda tensors, b=largest: tensors.update({name: b.to(kind)}))
        with pytest.raises(InvalidInputError, match=rf"{WEIGHTS}: {name} holds weights that are NaN or infinite"):
            _load(tmp_path, llama.decoder.spec)


def test_weights_that_are_not_finite_are_found_in_a_large_tensor(tmp_path: Path) -> None:
    """It is looked through piece by piece."""
    tensors = {"a": torch.zeros(3), "b": torch.zeros(1_500_001), "none": torch.zeros(0), "whole": torch.ones(4).int()}
    for place in (None, 0, 262_143, 262_144, 1_500_000):
        if place is not None:
            tensors["b"].zero_()[place] = torch.inf
        save_file(tensors, tmp_path / "file")
        with (tmp_path / "file").open("rb") as file:
            header = read_header(file)
            assert first_not_finite(read_whole(file, header), header) == (None if place is None else "b")


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_bad_folders_are_refused(llama: Pair, tmp_path: Path, name: str) -> None:
    save_adapter(support.random_adapter(llama.decoder, 0), tmp_path, "base")
    _load(tmp_path, llama.decoder.spec)
    spoil, message = BAD_FOLDERS[name]
    spoil(tmp_path)
    with pytest.raises(InvalidInputError, match=message) as caught:
        _load(tmp_path, llama.decoder.spec)
    assert str(tmp_path) in str(caught.value)


def test_what_was_read_of_an_adapter_outlives_its_file(llama: Pair, tmp_path: Path) -> None:
    """A file that is mapped is as its disk has it, and whoever looks beyond its end is killed."""
    save_adapter(support.random_adapter(llama.decoder, 0), tmp_path, "base")
    adapter = _load(tmp_path, llama.decoder.spec)
    with (tmp_path / WEIGHTS).open("r+b") as file:
        file.write(bytes((tmp_path / WEIGHTS).stat().st_size))
    expected = support.random_adapter(llama.decoder, 0)
    for key, pair in adapter.weights.items():
        assert torch.equal(pair.a, expected.weights[key].a)
        assert torch.equal(pair.b, expected.weights[key].b)


def test_a_file_that_is_cut_short_while_it_is_read_is_named(
    llama: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_adapter(support.random_adapter(llama.decoder, 0), tmp_path, "base")

    def cut(*arguments: Any) -> bytes:
        os.truncate(tmp_path / WEIGHTS, 4000)
        return read_whole(*arguments)

    monkeypatch.setattr(adapter_files, "read_whole", cut)
    with pytest.raises(InvalidInputError, match=f"{WEIGHTS} is not.*it holds 4000 of the [0-9]+ bytes"):
        _load(tmp_path, llama.decoder.spec)


def test_a_file_that_is_replaced_while_it_is_read_gives_the_one_or_the_other(
    llama: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (support.random_adapter(llama.decoder, 0, r=r) for r in (4, 2))
    save_adapter(first, tmp_path / "first", "base")
    save_adapter(second, tmp_path / "second", "base")

    def replaced(*arguments: Any) -> bytes:
        os.replace(tmp_path / "second" / WEIGHTS, tmp_path / "first" / WEIGHTS)
        return read_whole(*arguments)

    monkeypatch.setattr(adapter_files, "read_whole", replaced)
    adapter = _load(tmp_path / "first", llama.decoder.spec)
    for key, pair in adapter.weights.items():
        assert torch.equal(pair.a, first.weights[key].a)


def test_an_adapter_of_another_model_is_refused(llama: Pair, pair_of: Callable[[str], Pair], tmp_path: Path) -> None:
    save_adapter(support.random_adapter(llama.decoder, 0), tmp_path, "base")
    with pytest.raises(InvalidInputError, match="this model needs"):
        _load(tmp_path, pair_of("qwen3").decoder.spec)


def test_the_rank_limit_is_inclusive(llama: Pair, tmp_path: Path) -> None:
    save_adapter(support.random_adapter(llama.decoder, 0, r=4), tmp_path, "base")
    _load(tmp_path, llama.decoder.spec, max_rank=4)
    with pytest.raises(InvalidInputError, match="rank 4"):
        _load(tmp_path, llama.decoder.spec, max_rank=3)
    shutil.rmtree(tmp_path)


def test_a_folder_that_has_gone_is_named_as_gone(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="is not there any more"):
        read_config(tmp_path / "gone")
    with pytest.raises(InvalidInputError, match=r"holds no adapter_config\.json"):
        read_config(tmp_path)
