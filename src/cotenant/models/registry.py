"""From what the user typed to a model's folder and shapes. No torch."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotenant.config import ModelConfig
from cotenant.core.errors import InvalidInputError, NotFoundError
from cotenant.core.user_path import looking_up
from cotenant.models.spec import ModelSpec, RopeScaling, spec_from_config

_ASSETS = Path(__file__).parent.parent / "assets"

BUILT_IN = ("tiny",)

# Published shapes, for benchmarks without a download.
ARCHITECTURES = {
    "llama-3.1-8b": ModelSpec(
        family="llama",
        num_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
        eos_token_ids=(128001, 128008, 128009),
        dtype="bfloat16",
    ),
    "llama-3.2-1b": ModelSpec(
        family="llama",
        num_layers=16,
        hidden_size=2048,
        intermediate_size=8192,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=128256,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
        tie_word_embeddings=True,
        eos_token_ids=(128001, 128008, 128009),
        dtype="bfloat16",
    ),
    "qwen2.5-7b": ModelSpec(
        family="qwen2",
        num_layers=28,
        hidden_size=3584,
        intermediate_size=18944,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=152064,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        attention_bias=True,
        eos_token_ids=(151645, 151643),
        dtype="bfloat16",
    ),
    "qwen3-8b": ModelSpec(
        family="qwen3",
        num_layers=36,
        hidden_size=4096,
        intermediate_size=12288,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        qk_norm=True,
        eos_token_ids=(151645, 151643),
        dtype="bfloat16",
    ),
}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TEXT_FILES = ["*.json", "*.jinja", "merges.txt", "*.model"]
_WEIGHT_FILES = ["*.safetensors"]
# Other formats' copies of the same weights lie in folders; named chat templates do, too, and are no such copies.
_LEFT_OUT = [*(f"*/{pattern}" for pattern in _TEXT_FILES + _WEIGHT_FILES if pattern != "*.jinja"), "consolidated*"]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that was found. ``folder`` holds its tokenizer and, unless ``random_weights``, its weights.

    None: random weights and no tokenizer.
    """

    name: str
    folder: Path | None
    spec: ModelSpec
    random_weights: bool = False


def model_path(name: str) -> Path:
    """The folder of a built-in model. Raises NotFoundError, listing them, for any other name."""
    if name not in BUILT_IN:
        raise NotFoundError(f"there is no built-in model '{name}'; built in: {', '.join(BUILT_IN)}", param="model")
    return _ASSETS / name


def resolve_model(config: ModelConfig) -> ResolvedModel:
    """Find the model: a built-in name, a folder, an architecture with random weights, or a Hugging Face hub id.

    May download from the hub. Raises NotFoundError for a name that is none of these, InvalidInputError for a model that
    cannot be run as asked.
    """
    is_dummy = config.load_format == "dummy"
    if not config.model.strip():
        raise InvalidInputError("MODEL is empty: give a folder, a Hugging Face id, or 'tiny'", param="model")
    if config.model in ARCHITECTURES and (is_dummy or not Path(config.model).is_dir()):
        if not is_dummy:
            raise InvalidInputError(
                f"'{config.model}' is an architecture without weights: add --load-format dummy to run it with random "
                "ones, or give a folder or a Hugging Face id",
                param="model",
            )
        return _checked(config, ResolvedModel(config.name, None, ARCHITECTURES[config.model], random_weights=True))
    folder = _find_folder(config.model, with_weights=not is_dummy)
    return _checked(config, ResolvedModel(config.name, folder, read_spec(folder), random_weights=is_dummy))


def read_spec(folder: Path) -> ModelSpec:
    """The spec of the model in a folder.

    Raises NotFoundError without a ``config.json`` there, InvalidInputError for one that cannot be used.
    """
    config = _read_json(folder / "config.json")
    if config is None:
        raise NotFoundError(f"{folder} holds no config.json, so it is not a Hugging Face model folder", param="model")
    return spec_from_config(config, _read_json(folder / "generation_config.json"))


def _find_folder(model: str, *, with_weights: bool) -> Path:
    if model in BUILT_IN:
        return model_path(model)
    with looking_up(model, "MODEL"):
        folder = Path(model).expanduser()
        is_there = folder.is_dir()
    if is_there:
        return folder
    if _HUB_ID.fullmatch(model):
        return _download(model, with_weights=with_weights)
    raise NotFoundError(
        f"unknown model '{model}'; accepted are: {', '.join(BUILT_IN)}; a folder in Hugging Face format; a hub id like "
        f"org/name; and with --load-format dummy: {', '.join(ARCHITECTURES)}",
        param="model",
    )


def _download(hub_id: str, *, with_weights: bool) -> Path:
    # Here and not above: half a second that folders and built-in models need not pay.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    patterns = _TEXT_FILES + (_WEIGHT_FILES if with_weights else [])
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=_LEFT_OUT))
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise NotFoundError(
            f"'{hub_id}' is not a folder here, and it cannot be fetched from the Hugging Face hub: {reason}",
            param="model",
        ) from error


def _checked(config: ModelConfig, resolved: ResolvedModel) -> ResolvedModel:
    limit = resolved.spec.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise InvalidInputError(
            f"--max-model-len {config.max_model_len} is more than the {limit} positions of {config.model}",
            param="max-model-len",
        )
    return resolved


def _read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None if there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}", param="model") from error
    if not isinstance(content, dict):
        raise InvalidInputError(f"{path} does not hold a JSON object", param="model")
    return content
