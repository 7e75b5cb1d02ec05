"""torchtune's single-device LoRA recipe, timed as `cotenant bench finetune` times ours: its model and its loss, made
and compiled as the recipe does, without its reading of files. Gradients are not clipped, as is the recipe's default.

python bench/torchtune_finetune.py MODEL_FOLDER --label torchtune --json OUT.json [--compile]

``--gradient-checkpointing`` is the recipe's enable_activation_checkpointing. Sequences are exactly full, so no mask is
needed. torchtune 0.6.1 needs torchao: 0.15 is the last version that has what it imports.
"""

from __future__ import annotations

import argparse
import json

import peer_training
import torch
from torchtune import modules, training
from torchtune.models.llama3_1 import lora_llama3_1
from torchtune.modules.loss import CEWithChunkedOutputLoss
from torchtune.modules.peft import get_adapter_params, set_trainable_params

ATTENTION_MODULES = ["q_proj", "k_proj", "v_proj", "output_proj"]


def main() -> None:
    arguments = peer_training.parse(__doc__, lambda parser: None)
    torch.manual_seed(0)
    config = json.loads((arguments.model / "config.json").read_text())
    model = _random_model(config, arguments)
    set_trainable_params(model, get_adapter_params(model))
    loss_function = CEWithChunkedOutputLoss()
    if arguments.compile:
        training.compile_model(model)
        loss_function = training.compile_loss(loss_function)
    if arguments.gradient_checkpointing:
        training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
    model.set_num_output_chunks(loss_function.num_output_chunks)
    model.train()
    ignored = torch.full((arguments.batch_size, 1), loss_function.ignore_index, device=peer_training.device())

    def loss(ids: torch.Tensor) -> torch.Tensor:
        return loss_function(model(tokens=ids), torch.hstack((ids[:, 1:], ignored)))

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    peer = peer_training.Peer(loss, parameters, max_grad_norm=None)
    peer_training.train(arguments, peer, config["vocab_size"], ["torchtune", "torchao"])


def _random_model(config: dict[str, float], arguments: argparse.Namespace) -> torch.nn.Module:
    with training.set_default_dtype(getattr(torch, arguments.dtype)), peer_training.device():
        return lora_llama3_1(
            ATTENTION_MODULES,
            apply_lora_to_mlp=True,
            vocab_size=config["vocab_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            embed_dim=config["hidden_size"],
            max_seq_len=arguments.seq_len,
            intermediate_dim=config["intermediate_size"],
            norm_eps=config["rms_norm_eps"],
            rope_base=int(config.get("rope_theta", 500_000)),
            lora_rank=arguments.r,
            lora_alpha=2 * arguments.r,
        )


if __name__ == "__main__":
    main()
