"""Reading config.json, and refusing what would be computed wrongly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from cotenant.core.errors import InvalidInputError
from cotenant.models.rope import RopeTables, inverse_frequencies
from cotenant.models.spec import ModelSpec, RopeScaling, spec_from_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_a_plain_config() -> None:
    assert spec_from_config(BASE) == ModelSpec(
        family="llama",
        num_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=50,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
    )


@pytest.mark.parametrize("scaling", [LLAMA3, {"rope_type": "linear", "factor": 3.0}, {"rope_type": "default"}])
def test_both_spellings_of_rotary_settings(scaling: dict[str, Any]) -> None:
    old = spec_from_config({**BASE, "rope_theta": 5e5, "rope_scaling": scaling})
    new = spec_from_config({**BASE, "rope_parameters": {"rope_theta": 5e5, **scaling}})
    assert old == new
    assert new.rope_theta == 5e5
    assert (new.rope_scaling is None) == (scaling["rope_type"] == "default")


def test_the_oldest_spelling_of_linear_scaling() -> None:
    spec = spec_from_config({**BASE, "rope_scaling": {"type": "linear", "factor": 2}})
    assert spec.rope_scaling == RopeScaling("linear", 2.0)


_SHORT = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_theta": 1e3}, "rope_scaling": {"type": "linear", "factor": 3.0}},
        {"rope_parameters": {"rope_theta": 1e3}, "rope_scaling": LLAMA3, "rope_theta": 77.0},
        {"rope_parameters": {"rope_theta": 1e3, "rope_type": "linear", "factor": 3.0}, "rope_scaling": {}},
        {"rope_parameters": {"rope_theta": 1e3, "rope_type": "linear", "factor": 3.0}, "rope_scaling": None},
        {"rope_scaling": _SHORT},
        {"rope_scaling": _SHORT, "original_max_position_embeddings": 32},
        {"rope_scaling": LLAMA3, "original_max_position_embeddings": 32},
    ],
)
def test_rotary_settings_in_several_places_are_read_as_transformers_reads_them(changes: dict[str, Any]) -> None:
    theirs = LlamaRotaryEmbedding(LlamaConfig(**copy.deepcopy({**BASE, **changes})))
    assert torch.allclose(inverse_frequencies(spec_from_config({**BASE, **changes})), theirs.inv_freq)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_tables_are_those_of_transformers(dtype: torch.dtype) -> None:
    """At the real size of Llama 3.1, where slow, fast and in-between frequencies all occur."""
    parameters = LLAMA3 | {"rope_theta": 500000.0, "original_max_position_embeddings": 8192}
    config = {**BASE, "head_dim": 128, "max_position_embeddings": 20000, "rope_parameters": parameters}
    positions = torch.tensor([0, 1, 77, 8191, 19999])
    cos, signed_sin = RopeTables(spec_from_config(config), torch.device("cpu"), dtype).at(positions)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**config))
    expected_cos, expected_sin = theirs(torch.zeros(1, dtype=dtype), positions[None])
    signs = torch.tensor([-1.0, 1.0], dtype=dtype).repeat_interleave(64)
    tolerance = {"atol": 1e-4 if dtype == torch.float32 else 8e-3, "rtol": 0.0}
    assert torch.allclose(cos[:, 0], expected_cos[0], **tolerance)
    assert torch.allclose(signed_sin[:, 0] * signs, expected_sin[0], **tolerance)


def test_end_of_sequence_ids() -> None:
    assert spec_from_config({**BASE, "eos_token_id": 3}).eos_token_ids == (3,)
    assert spec_from_config({**BASE, "eos_token_id": 3}, {"eos_token_id": [4, 5]}).eos_token_ids == (4, 5)
    assert spec_from_config({**BASE, "eos_token_id": [3, 7]}, {}).eos_token_ids == (3, 7)
    assert spec_from_config({**BASE, "eos_token_id": 3}, {"eos_token_id": []}).eos_token_ids == (3,)
    assert spec_from_config(BASE).eos_token_ids == ()


def test_the_two_names_of_a_family_have_to_agree() -> None:
    """AutoModel goes by the other one: a window, or what a Gemma multiplies by, would be ignored in silence."""
    for name, model_type in (
        ("LlamaForCausalLM", "mistral"),
        ("MistralForCausalLM", "llama"),
        ("LlamaForCausalLM", "gemma"),
    ):
        with pytest.raises(InvalidInputError, match=f"architectures has {name}, and model_type is '{model_type}'"):
            spec_from_config({**BASE, "architectures": [name], "model_type": model_type})
    assert spec_from_config({**BASE, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}) == spec_from_config(
        {**BASE, "architectures": ["LlamaForCausalLM"]}
    )


def test_rope_parameters_of_each_kind_of_layer_are_refused() -> None:
    nested = {"full_attention": {"rope_type": "yarn", "factor": 4, "rope_theta": 1e6}}
    with pytest.raises(InvalidInputError, match="rope_parameters of each kind of layer, full_attention"):
        spec_from_config({**BASE, "rope_parameters": nested})


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"])
def test_a_window_that_is_switched_on_and_not_given_is_transformers_own(name: str) -> None:
    config = {**BASE, "architectures": [name], "use_sliding_window": True, "max_window_layers": 0}
    config.pop("model_type", None)
    config.pop("sliding_window", None)
    assert spec_from_config(config).sliding_window == 4096
    assert spec_from_config({**config, "sliding_window": None}).sliding_window is None


def test_settings_that_a_family_does_not_have_are_passed_over() -> None:
    spec_from_config({**BASE, "architectures": ["Qwen2ForCausalLM"], "mlp_bias": True, "hidden_act": "swish"})
    with pytest.raises(InvalidInputError, match="mlp_bias"):
        spec_from_config({**BASE, "architectures": ["LlamaForCausalLM"], "mlp_bias": True})


def test_families_differ() -> None:
    def spec(name: str, **changes: Any) -> ModelSpec:
        return spec_from_config({**BASE, "architectures": [name], **changes})

    assert spec("Qwen2ForCausalLM").attention_bias
    assert not spec("Qwen2ForCausalLM").output_bias
    assert spec("Qwen3ForCausalLM").qk_norm
    assert spec("Qwen3ForCausalLM").head_dim == 128
    assert spec("LlamaForCausalLM", attention_bias=True).output_bias
    assert spec("MistralForCausalLM", sliding_window=32).sliding_window == 32
    assert spec("MistralForCausalLM", sliding_window=None).sliding_window is None
    assert spec("MistralForCausalLM").sliding_window == MistralConfig().sliding_window == 4096
    assert spec("LlamaForCausalLM").sliding_window is spec("Qwen2ForCausalLM").sliding_window is None
    assert spec("Qwen2ForCausalLM", sliding_window=32, use_sliding_window=False).sliding_window is None
    windowed = {"sliding_window": 32, "use_sliding_window": True}
    assert spec("Qwen2ForCausalLM", **windowed, max_window_layers=2).sliding_window is None
    assert spec("Qwen2ForCausalLM", **windowed, max_window_layers=0).sliding_window == 32
    assert spec("Qwen3ForCausalLM", **windowed, layer_types=["sliding_attention"] * 2).sliding_window == 32


_WINDOW = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"GPT2LMHeadModel; supported are LlamaForCausalLM, .*Qwen3ForCausalLM",
        ),
        ({"architectures": None, "model_type": "gemma"}, "gemma"),
        ({"architectures": [["x"]]}, r"architectures must be a list of class names, but is \[\['x'\]\]"),
        ({"architectures": 5}, "architectures must be a list of class names, but is 5"),
        ({"eos_token_id": 1.5}, r"config\.json: eos_token_id must be a token's id or a list of them, but is 1\.5"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be"),
        ({"eos_token_id": [[1]]}, "eos_token_id must be"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not supported"),
        (
            {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "'yarn' is not supported",
        ),
        ({"rope_scaling": ["linear"]}, "rope_scaling must be an object"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor must be a positive number"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": "1"}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be a positive integer, but is None"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        (_WINDOW | {"max_window_layers": 1}, "some of the layers"),
        (_WINDOW | {"layer_types": 1}, "layer_types must be a list of kinds of attention, but is 1"),
        (_WINDOW | {"max_window_layers": "x"}, "max_window_layers must be a number of layers, but is 'x'"),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        spec_from_config({**BASE, **changes})


def test_ends_of_another_kind_in_a_generation_config_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"generation_config\.json: eos_token_id must be .* '</s>'"):
        spec_from_config({**BASE, "eos_token_id": 3}, {"eos_token_id": "</s>"})


def test_model_type_stands_in_for_architectures() -> None:
    config = {key: value for key, value in BASE.items() if key != "architectures"}
    assert spec_from_config({**config, "model_type": "qwen3"}).family == "qwen3"
