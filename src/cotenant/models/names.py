"""What Hugging Face checkpoints call the linear modules. No torch."""

from __future__ import annotations

_PARENTS = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}


def module_name(layer: int, module: str) -> str:
    """The full name of one of ``core.job.LINEAR_MODULES`` in a layer."""
    return f"model.layers.{layer}.{_PARENTS[module]}.{module}"
