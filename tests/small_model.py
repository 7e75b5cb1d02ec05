"""A model smaller than the built-in one, random, for tests of figures that are the same of any model."""

from __future__ import annotations

import json
from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def small_model(folder: Path, max_position_embeddings: int = 1024) -> list[str]:
    """How a command names it: its folder, which is made in ``folder``, and that its weights are random."""
    path = folder / "small"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": max_position_embeddings}))
    return [str(path), "--load-format", "dummy"]
