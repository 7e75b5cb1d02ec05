"""How fast a job trains in less and less memory: what the planner of memory chooses, beside what it might have chosen.

    python bench/recomputation.py llama-3.1-8b --load-format dummy

First each size of micro-batch with no layer recomputed and with all of them that can be, in whatever memory that takes;
then the planner's choice of sizes and numbers of recomputed layers for each number of GiB. One model in one process.
"""

from __future__ import annotations

import argparse
import gc
from typing import Any

import torch

from cotenant.config import LOAD_FORMATS, ModelConfig
from cotenant.core.errors import CotenantError
from cotenant.device import create_device
from cotenant.models.loading import load_decoder
from cotenant.models.registry import resolve_model
from cotenant.runtime.build import choose_dtype
from cotenant.runtime.engine_bench import measure_ceilings
from cotenant.runtime.finetune_bench import FinetuneBench
from cotenant.runtime.finetune_workload import Workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load-format", default="auto", choices=LOAD_FORMATS)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--tokens-per-step", type=int, default=16384)
    parser.add_argument("--sizes", type=_numbers, default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--gib", type=_numbers, default=[2, 3, 4, 6, 8, 12, 16, 24, 32])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup-steps", type=int, default=2)
    arguments = parser.parse_args()
    device = create_device(arguments.device)
    config = ModelConfig(model=arguments.model, device=arguments.device, load_format=arguments.load_format)
    resolved = resolve_model(config)
    dtype = choose_dtype("auto", resolved.spec.dtype, device)
    decoder = load_decoder(resolved, device.torch_device, dtype, seed=0)
    ceilings = measure_ceilings(device.torch_device, dtype)
    print(f"{resolved.name}, {str(dtype).removeprefix('torch.')}, {device.name}", flush=True)

    def run(tokens: int, gib: float | None, *, recompute_all: bool = False) -> dict[str, Any]:
        most = None if gib is None else int(gib * 2**30)
        workload = Workload(arguments.seq_len, arguments.tokens_per_step, tokens, 16, recompute_all, None, most)
        bench = None
        try:
            bench = FinetuneBench(device, resolved, decoder, ceilings, workload)
            figures, description = bench.steps(arguments.steps, arguments.warmup_steps), bench.description()
            held = bench.arena_gib
        finally:
            if bench is not None:
                bench.close()
            gc.collect()
            if device.torch_device.type == "cuda":
                device.release_kept_memory()
                torch.cuda.empty_cache()
        return {
            "gib": gib,
            "arena_gib": held,
            "micro_batch_tokens": description["micro_batch_tokens"],
            "num_recomputed_layers": description["num_recomputed_layers"],
            "tokens_per_s": figures["tokens_per_s"],
        }

    cases = [(size, None, recompute_all) for size in arguments.sizes for recompute_all in (False, True)]
    for tokens, gib, recompute_all in [*cases, *((max(arguments.sizes), gib, False) for gib in arguments.gib)]:
        try:
            result = run(tokens, gib, recompute_all=recompute_all)
        except CotenantError as error:
            print(f"{gib} GiB: {error}", flush=True)
            continue
        limit = "as needed" if gib is None else f"{gib} GiB"
        print(
            f"{limit}: {result['micro_batch_tokens']} tokens, {result['num_recomputed_layers']} layers recomputed, "
            f"{result['arena_gib']:.2f} GiB of arena, {result['tokens_per_s']['mean']:,.0f} tokens/s",
            flush=True,
        )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
