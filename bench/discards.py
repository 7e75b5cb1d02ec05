"""What discards at random moments change in an adapter, beside what a second run without any does.

    python bench/discards.py llama-3.1-8b --load-format dummy --discards 200

The same job three times: twice undisturbed, then with `--discards` of its micro-batch in flight, spread over the steps,
each at a random place in what is left of the step. Every other one also requires half of the memory of activations; the
job has it again from the next step on. The numbers are distances between adapters as shares of how far training has
come: of the matrices B, which begin with zeros. On a CPU they are 0: every bit is the same.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import safetensors.torch
import torch

from cotenant.config import LOAD_FORMATS, ModelConfig
from cotenant.core.job import JobSpec
from cotenant.device import Device, create_device
from cotenant.finetune.job import TrainingJob
from cotenant.models.decoder import Decoder
from cotenant.models.loading import load_decoder
from cotenant.models.registry import resolve_model
from cotenant.runtime.build import choose_dtype
from cotenant.runtime.finetune_workload import Workload, write_random_dataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load-format", default="auto", choices=LOAD_FORMATS)
    parser.add_argument("--discards", type=int, default=200)
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--tasklet-tokens", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    arguments = parser.parse_args()
    device = create_device(arguments.device)
    resolved = resolve_model(
        ModelConfig(model=arguments.model, device=arguments.device, load_format=arguments.load_format)
    )
    dtype = choose_dtype("auto", resolved.spec.dtype, device)
    decoder = load_decoder(resolved, device.torch_device, dtype, seed=0)
    workload = Workload(arguments.seq_len, arguments.tokens_per_step, arguments.tasklet_tokens, 16, False)
    with TemporaryDirectory(prefix="cotenant-bench-") as temporary:
        dataset = Path(temporary) / "train.safetensors"
        write_random_dataset(dataset, workload, resolved.spec.vocab_size, arguments.steps)
        hyper = replace(
            workload.hyperparameters(),
            n_epochs=1,
            max_steps=arguments.steps,
            learning_rate=arguments.learning_rate,
        )
        found = []
        for name, discards in (("first", 0), ("second", 0), ("discards", arguments.discards)):
            spec = JobSpec(name, resolved.name, f"{temporary}/{name}", str(dataset), None, "adapter", hyper)
            begin_s = time.perf_counter()
            num_done = _train(decoder, device, spec, arguments.tasklet_tokens, discards / arguments.steps)
            took_s = time.perf_counter() - begin_s
            print(f"{name}: {arguments.steps} steps, {num_done} discards, {took_s:.1f} s", flush=True)
            found.append(_adapter(Path(spec.folder)))
    first, second, discarded = found
    print(f"{resolved.name}, {str(dtype).removeprefix('torch.')}, {device.name}")
    print(f"run to run {_distance(first, second):.3%}, with {arguments.discards} discards:", end=" ")
    print(f"{_distance(first, discarded):.3%} from the first run, {_distance(second, discarded):.3%} from the second")


def _train(decoder: Decoder, device: Device, spec: JobSpec, tasklet_tokens: int, discards_per_step: float) -> int:
    """How many discards there were."""
    free_bytes = None if device.torch_device.type == "cpu" else device.memory_bytes()[0]
    job = TrainingJob(decoder, spec, tasklet_tokens, None, free_bytes=free_bytes, device=device)
    generator, num_done = random.Random(0), 0
    while not job.done:
        num_left = sum(cycle.num_tasklets for cycle in job.upcoming())
        if num_left == 0:
            job.wait_for_writes()
        elif num_done < round(discards_per_step * (job.step + 1)):
            _run(job, device, generator.randrange(num_left))
            required = 0
            if num_done % 2:
                device.synchronize()
                required = job.require(job.left_bytes // 2)
            job.discard_step()
            job.release(required)
            num_done += 1
        else:
            _run(job, device, num_left)
        job.take_updates()
    job.close()
    return num_done


def _run(job: TrainingJob, device: Device, num_tasklets: int) -> None:
    for _ in range(num_tasklets):
        if not job.runnable:
            return
        device.wait_for_room()
        device.run_tasklet(job.run_tasklet)


def _adapter(folder: Path) -> torch.Tensor:
    weights = safetensors.torch.load_file(folder / "adapter" / "adapter_model.safetensors")
    return torch.cat([tensor.flatten().float() for name, tensor in sorted(weights.items()) if "lora_B" in name])


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.linalg.norm(one - other) / torch.linalg.norm(one))


if __name__ == "__main__":
    main()
