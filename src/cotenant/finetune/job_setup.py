"""What a job begins with: a fresh adapter, and its share of the device's memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from cotenant.core.job import LINEAR_MODULES, JobSpec
from cotenant.finetune.activations import Activations
from cotenant.finetune.budget import ActivationBudget, choices
from cotenant.finetune.footprint import (
    activation_bytes,
    captured_bytes,
    lacking_room,
    passing_bytes,
)
from cotenant.models.decoder import Decoder
from cotenant.models.lora import LoraAdapter
from cotenant.models.spec import ModelSpec


def new_adapter(spec: JobSpec, model: ModelSpec) -> LoraAdapter:
    """As PEFT makes it from the job's settings, on the CPU. Raises InvalidInputError, as ``LoraAdapter.trainable``
    does."""
    hyper = spec.hyperparameters
    return LoraAdapter.trainable(
        model,
        r=hyper.r,
        alpha=hyper.lora_alpha,
        target_modules=hyper.target_modules,
        seed=hyper.seed,
        dropout=hyper.lora_dropout,
        use_rslora=hyper.use_rslora,
        rank_pattern=hyper.rank_pattern,
        alpha_pattern=hyper.alpha_pattern,
        name=spec.adapter_name,
    )


def make_budget(
    decoder: Decoder,
    activations: Activations | None,
    sizes: Sequence[int],
    longest_measured: int,
    free_bytes: int | None,
    taken_bytes: int,
    efficiency: Callable[[int], float] | None,
    *,
    recompute_all: bool,
) -> ActivationBudget:
    """``sizes``: tokens of micro-batches that train, ascending; ``longest_measured``: of the longest validation
    example, which is never cut (0: there is none). ``activations``: where layers are captured. ``free_bytes``: of the
    device, for the job, whose adapter takes ``taken_bytes`` of them; None: enough. ``efficiency`` and
    ``recompute_all``: see ``choices``. Raises CotenantError if nothing has room."""
    spec, dtype = decoder.spec, decoder.dtype

    def needed(size: int, num_recomputed: int) -> int:
        if activations is None:
            return activation_bytes(spec, size, dtype, num_recomputed)
        return activations.bytes_for(size, num_recomputed)

    if activations is None:
        uncut, chunk = passing_bytes(spec, longest_measured, dtype), 1
    else:
        uncut, chunk = activations.passing_bytes_for(longest_measured), activations.chunk_bytes

    def beside(widest: int) -> int:
        """What passes within a tasklet of captured layers lies beside the arena, where the graphs of each lane find
        it. Others' is in what a micro-batch needs."""
        if activations is None:
            return 0
        return activations.num_lanes * captured_bytes(spec, max(widest, longest_measured), dtype)

    share = _recomputed_share(spec, with_last=activations is None)
    ways = choices(sizes, spec.num_layers, needed, share, efficiency, recompute_all=recompute_all)

    def budget(widest: int) -> ActivationBudget:
        left = None if free_bytes is None else max(0, free_bytes - taken_bytes - beside(widest))
        narrow = [way for way in ways if way.max_tokens <= widest]
        # Validation and DPO's reference never run while training keeps something, and are cut as it is.
        return ActivationBudget(narrow, kept_back_bytes=uncut, available_bytes=left, granularity_bytes=chunk)

    def rank(budget: ActivationBudget) -> tuple[bool, float, int]:
        return budget.left_bytes < uncut, budget.time, -budget.max_tokens

    # The wider the widest micro-batch, the less is left for what layers keep.
    best = min(map(budget, reversed(sizes)), key=rank)
    longest = min(sizes)
    least = -(-max(needed(longest, spec.num_layers - 1), uncut) // chunk) * chunk
    if free_bytes is not None and best.left_bytes < least:
        raise lacking_room(taken_bytes + beside(longest) + least, free_bytes, longest, longest_measured)
    return best


def _recomputed_share(spec: ModelSpec, *, with_last: bool) -> float:
    """Of the products of a layer's forward and backward, those that are done again where it is recomputed: all of the
    forward's, ``with_last`` or without its last one, whose result nobody reads. (The backward's are as many: gradients
    of inputs, over frozen weights.)"""
    sizes = {module: math.prod(spec.module_shape(module)) for module in LINEAR_MODULES}
    skipped = 0 if with_last else sizes["down_proj"]
    return 0.5 * (1.0 - skipped / sum(sizes.values()))
