"""What a job begins with: a fresh adapter, and its share of the device's memory."""

from __future__ import annotations

from cotenant.core.job import Hyperparameters, JobSpec
from cotenant.finetune.footprint import require_room, state_bytes
from cotenant.finetune.order import DataOrder
from cotenant.models.decoder import Decoder
from cotenant.models.lora import LoraAdapter


def new_adapter(spec: JobSpec, decoder: Decoder) -> LoraAdapter:
    """As PEFT makes it from the job's settings. Raises InvalidInputError as ``LoraAdapter.trainable`` does."""
    hyper = spec.hyperparameters
    return LoraAdapter.trainable(
        decoder.spec,
        r=hyper.r,
        alpha=hyper.lora_alpha,
        target_modules=hyper.target_modules,
        seed=hyper.seed,
        dropout=hyper.lora_dropout,
        use_rslora=hyper.use_rslora,
        rank_pattern=hyper.rank_pattern,
        alpha_pattern=hyper.alpha_pattern,
        device=decoder.device,
        name=spec.adapter_name,
    )


def left_for_activations(
    decoder: Decoder, adapter: LoraAdapter, order: DataOrder, hyper: Hyperparameters, free_bytes: int
) -> int:
    """Of ``free_bytes``, what the adapter's training state leaves. Raises CotenantError, as ``require_room`` does, if
    not even the smallest micro-batch fits there."""
    num_weights = sum(matrix.numel() for matrix in adapter.parameters())
    recompute = hyper.gradient_checkpointing
    require_room(decoder.spec, decoder.dtype, num_weights, order.longest, free_bytes, recompute=recompute)
    return free_bytes - state_bytes(num_weights)
