"""Hugging Face PEFT, timed as `cotenant bench finetune` times ours: transformers' model with SDPA, LoRA on all linear
layers in the model's dtype, gradients clipped to norm 1 as transformers' Trainer does.

python bench/peft_finetune.py MODEL_FOLDER --label peft --json OUT.json [--liger cross-entropy] [--compile]

``--liger cross-entropy`` takes Liger's fused linear cross-entropy alone, ``all`` its norm, rotary embedding and SwiGLU
too. ``--compile`` compiles layer by layer: compiled whole, transformers would make an attention mask, with which SDPA
is slower than with its causal flag. Sequences are exactly full, so no mask is needed.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import peer_training
import torch

from cotenant.processes import importing

if TYPE_CHECKING:
    from transformers import AutoConfig, LlamaForCausalLM

TARGET_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    arguments = peer_training.parse(__doc__, _add_flags)
    # Here and not above: they take seconds, and whoever gave sizes that do not divide each other knows it before.
    with importing():
        from peft import LoraConfig, get_peft_model
        from transformers import AutoConfig

    torch.manual_seed(0)
    if arguments.liger != "none":
        _apply_liger(arguments.liger)
    config = AutoConfig.from_pretrained(arguments.model)
    base = _random_model(config, getattr(torch, arguments.dtype))
    lora = LoraConfig(r=arguments.r, lora_alpha=2 * arguments.r, target_modules=TARGET_MODULES, task_type="CAUSAL_LM")
    model = get_peft_model(base, lora, autocast_adapter_dtype=False)
    model.train()
    if arguments.gradient_checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    if arguments.compile:
        for layer in base.model.layers:
            layer.compile()
        base.model.norm.compile()
        if arguments.liger == "none":
            base.loss_function = torch.compile(base.loss_function)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    packages = ["transformers", "peft", *(["liger_kernel"] if arguments.liger != "none" else [])]
    peer_training.train(arguments, peer_training.Peer(loss, parameters, 1.0), config.vocab_size, packages)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--liger", choices=["none", "cross-entropy", "all"], default="none")


def _apply_liger(kernels: str) -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    others = kernels == "all"
    apply_liger_kernel_to_llama(fused_linear_cross_entropy=True, rope=others, rms_norm=others, swiglu=others)


def _random_model(config: AutoConfig, dtype: torch.dtype) -> LlamaForCausalLM:
    """Made on the device in its dtype: no copy in host memory."""
    from transformers import LlamaForCausalLM

    config._attn_implementation = "sdpa"
    config.use_cache = False
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with peer_training.device():
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


if __name__ == "__main__":
    main()
