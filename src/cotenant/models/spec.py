"""What a model is: its family and shapes, read from a Hugging Face ``config.json``. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cotenant.core.errors import InvalidInputError
from cotenant.core.job import LINEAR_MODULES

FAMILY_OF_ARCHITECTURE = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

_DEFAULT_ROPE_THETA = 10000.0
_DEFAULT_WINDOW = 4096  # transformers' default


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched. ``kind`` "linear" uses ``factor`` alone, "llama3" all of them.

    "llama3" (Llama 3.1): with o = ``original_max_position_embeddings``, wavelengths longer than o / ``low_freq_factor``
    are stretched by ``factor``, those shorter than o / ``high_freq_factor`` not at all, with a ramp between.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder of the Llama family.

    ``attention_bias``: q, k and v have biases; ``output_bias``: o has one. ``qk_norm``: queries and keys are normalised
    per head (Qwen3). ``sliding_window``: a token attends to that many last tokens, itself included; None: to all.
    ``dtype`` is the checkpoint's, by torch's name, if its config says.
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = _DEFAULT_ROPE_THETA
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None

    def module_shape(self, module: str) -> tuple[int, int]:
        """(out, in) features of one of ``core.job.LINEAR_MODULES``."""
        query, key_value = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": (query, self.hidden_size),
            "k_proj": (key_value, self.hidden_size),
            "v_proj": (key_value, self.hidden_size),
            "o_proj": (self.hidden_size, query),
            "gate_proj": (self.intermediate_size, self.hidden_size),
            "up_proj": (self.intermediate_size, self.hidden_size),
            "down_proj": (self.hidden_size, self.intermediate_size),
        }[module]

    @property
    def layer_parameters(self) -> int:
        """Weights of all layers' linear modules."""
        return self.num_layers * sum(num_out * num_in for num_out, num_in in map(self.module_shape, LINEAR_MODULES))

    def group_shape(self, modules: Sequence[str]) -> tuple[int, int]:
        """(out, in) features of modules that read the same input, as one matrix."""
        shapes = [self.module_shape(module) for module in modules]
        return sum(num_out for num_out, _ in shapes), shapes[0][1]


def spec_from_config(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelSpec:
    """Read a ``config.json`` (and, for the end-of-sequence ids, a ``generation_config.json``).

    Both spellings of the rotary settings are understood: ``rope_theta`` with ``rope_scaling``, and transformers 5's
    ``rope_parameters``. Of a config with both, ``rope_parameters`` counts for nothing, as in transformers. Raises
    InvalidInputError, naming the field, for what this decoder cannot run faithfully.
    """
    family = _family(config)
    _refuse_unsupported(config, family)
    hidden_size, num_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    num_kv_heads = _size(config, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise InvalidInputError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}",
            param="model",
        )
    head_dim = _size(config, "head_dim", default=128 if family == "qwen3" else hidden_size // num_heads)
    if head_dim % 2:
        raise InvalidInputError(
            f"config.json: head_dim {head_dim} is odd; rotary embeddings need an even one", param="model"
        )
    max_position_embeddings = _size(config, "max_position_embeddings")
    rope_theta, rope_scaling = _rope(config, max_position_embeddings)
    num_layers = _size(config, "num_hidden_layers")
    has_bias = bool(config.get("attention_bias", False)) and family in ("llama", "qwen3")
    return ModelSpec(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_size(config, "vocab_size"),
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=_number(config, "rms_norm_eps", default=1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=has_bias or family == "qwen2",
        output_bias=has_bias,
        qk_norm=family == "qwen3",
        sliding_window=_sliding_window(config, family, num_layers),
        eos_token_ids=_eos_token_ids(config, generation_config),
        dtype=config.get("dtype") or config.get("torch_dtype"),
    )


def _family(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures")
    if architectures:
        architectures = _texts(config, "architectures", "class names")
        for name in architectures:
            if name in FAMILY_OF_ARCHITECTURE:
                return _same_family(FAMILY_OF_ARCHITECTURE[name], name, config.get("model_type"))
        found = ", ".join(architectures)
    else:
        found = str(config.get("model_type"))
        if found in FAMILY_OF_ARCHITECTURE.values():
            return found
    raise InvalidInputError(
        f"unsupported model architecture {found}; supported are {', '.join(FAMILY_OF_ARCHITECTURE)}", param="model"
    )


def _same_family(family: str, architecture: str, model_type: object) -> str:
    """By both of a config's names; transformers' AutoModel goes by the other one."""
    if model_type not in (None, family):
        raise InvalidInputError(
            f"config.json: architectures has {architecture}, and model_type is {model_type!r}: which is it?",
            param="model",
        )
    return family


def _refuse_unsupported(config: Mapping[str, Any], family: str) -> None:
    problems = []
    if config.get("quantization_config"):
        problems.append("quantization_config (load the unquantised weights)")
    if config.get("mlp_bias") and family == "llama":  # the others have no such setting
        problems.append("mlp_bias")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):  # one function
        problems.append(f"hidden_act {config['hidden_act']!r} (only 'silu')")
    if problems:
        raise InvalidInputError(f"config.json asks for what is not supported: {'; '.join(problems)}", param="model")


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidInputError(f"config.json: {key} must be a positive integer, but is {value!r}", param="model")
    return value


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise InvalidInputError(f"config.json: {key} must be a positive number, but is {value!r}", param="model")
    return float(value)


def _texts(config: Mapping[str, Any], key: str, items: str) -> list[str]:
    """A list of ``items``, as the error calls them."""
    value = config[key]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidInputError(f"config.json: {key} must be a list of {items}, but is {value!r}", param="model")
    return value


def _rope(config: Mapping[str, Any], max_position_embeddings: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling. ``rope_parameters`` holds both; ``rope_scaling`` is the older spelling of its other entries,
    and goes before it: people add a model card's to a config that transformers 5 has saved."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    settings = config.get(key) or {}
    if not isinstance(settings, Mapping):
        raise InvalidInputError(f"config.json: {key} must be an object, but is {settings!r}", param="model")
    theta = _number({"rope_theta": config.get("rope_theta"), **settings}, "rope_theta", _DEFAULT_ROPE_THETA)
    partial = settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise InvalidInputError(f"config.json: partial_rotary_factor {partial!r} is not supported", param="model")
    nested = [name for name, value in settings.items() if isinstance(value, Mapping)]
    if nested:
        raise InvalidInputError(
            f"config.json: {key} of each kind of layer, {nested[0]}, is not supported", param="model"
        )
    kind = settings.get("rope_type", settings.get("type"))
    if kind in (None, "default"):
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", _number(settings, "factor"))
    if kind == "llama3":
        # As in transformers, one at the config's top goes before one in here.
        original = settings if config.get("original_max_position_embeddings") is None else config
        return theta, RopeScaling(
            "llama3",
            factor=_number(settings, "factor"),
            low_freq_factor=_number(settings, "low_freq_factor"),
            high_freq_factor=_number(settings, "high_freq_factor"),
            original_max_position_embeddings=_size(
                original, "original_max_position_embeddings", default=max_position_embeddings
            ),
        )
    raise InvalidInputError(
        f"config.json: rope type {kind!r} is not supported; supported are default, linear, llama3", param="model"
    )


def _sliding_window(config: Mapping[str, Any], family: str, num_layers: int) -> int | None:
    """The window if all layers have it, None if none has.

    Llama has none. Mistral's holds for all layers. Qwen switches it on, and lists or counts the layers that have it. Of
    both only null says that there is none.
    """
    config = {"sliding_window": _DEFAULT_WINDOW, **config}
    if family == "llama" or config.get("sliding_window") is None:
        return None
    if family != "mistral":
        if not config.get("use_sliding_window", False):
            return None
        kinds = _layer_types(config, num_layers)
        if all(kind == "full_attention" for kind in kinds):
            return None
        if any(kind != "sliding_attention" for kind in kinds):
            raise InvalidInputError(
                "config.json: use_sliding_window in some of the layers only is not supported", param="model"
            )
    return _size(config, "sliding_window")


def _layer_types(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Each layer's kind of attention, of a Qwen whose window is on."""
    if config.get("layer_types"):
        return _texts(config, "layer_types", "kinds of attention")
    num_full = config.get("max_window_layers", 28)
    if not isinstance(num_full, int):
        raise InvalidInputError(
            f"config.json: max_window_layers must be a number of layers, but is {num_full!r}", param="model"
        )
    return ["full_attention" if layer < num_full else "sliding_attention" for layer in range(num_layers)]


def _eos_token_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None) -> tuple[int, ...]:
    for file, given in (("generation_config.json", generation_config or {}), ("config.json", config)):
        value = given.get("eos_token_id")
        if value is None or value == []:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
            raise InvalidInputError(
                f"{file}: eos_token_id must be a token's id or a list of them, but is {value!r}", param="model"
            )
        return tuple(ids)
    return ()
