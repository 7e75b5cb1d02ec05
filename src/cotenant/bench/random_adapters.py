"""LoRA adapters of random weights in PEFT's format, for loads that only need them to differ."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from cotenant.core.errors import InvalidInputError

_SCALE = 0.02


def make_adapters(folder: Path, config_path: Path, count: int, rank: int, seed: int) -> dict[str, str]:
    """Write ``count`` adapters for the model of a Hugging Face ``config.json``; their folders by name.

    All linear modules of all layers have LoRA, in float16. Raises InvalidInputError for a config that cannot be read.
    """
    shapes = _shapes(config_path)
    folders: dict[str, str] = {}
    for number in range(count):
        name = f"soak-{number}"
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        _write(target, shapes, rank, np.random.default_rng((seed, number)))
        folders[name] = str(target.resolve())
    return folders


def _write(folder: Path, shapes: dict[str, tuple[int, int]], rank: int, rng: np.random.Generator) -> None:
    def draw(rows: int, columns: int) -> npt.NDArray[np.float16]:
        return (rng.standard_normal((rows, columns), dtype=np.float32) * _SCALE).astype(np.float16)

    tensors: dict[str, npt.NDArray[np.float16]] = {}
    for name, (num_out, num_in) in shapes.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = draw(rank, num_in)
        tensors[f"base_model.model.{name}.lora_B.weight"] = draw(num_out, rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in shapes}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")


def _shapes(config_path: Path) -> dict[str, tuple[int, int]]:
    """(out, in) of each linear module, by its name in the checkpoint."""
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or hidden // heads)
        inner, num_layers = int(config["intermediate_size"]), int(config["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(f"--config: {config_path} is no model's config.json: {error!r}") from error
    modules = {
        "self_attn.q_proj": (heads * head_dim, hidden),
        "self_attn.k_proj": (kv_heads * head_dim, hidden),
        "self_attn.v_proj": (kv_heads * head_dim, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return {f"model.layers.{layer}.{module}": shape for layer in range(num_layers) for module, shape in modules.items()}
