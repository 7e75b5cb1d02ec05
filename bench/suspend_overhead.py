"""What being suspendable costs: training steps cut into tasklets after every layer, against uncut ones.

Uncut: a micro-batch's forward, loss and backward in one go. Cut: the same micro-batches as tasklets, with the next ones
looked up before each, as the worker does. Both use the same data, loss, optimizer and weights. A
pair is ``--steps`` steps of each, taken in turn so that other load on the machine hits both alike; every other pair
begins with the other kind.

    python bench/suspend_overhead.py
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import safetensors.torch
import torch

from cotenant.config import ModelConfig
from cotenant.core.job import Hyperparameters, JobSpec
from cotenant.finetune.dataset import Dataset, load_dataset
from cotenant.finetune.microbatch import build
from cotenant.finetune.objective import CrossEntropy
from cotenant.finetune.order import DataOrder
from cotenant.finetune.progress import Progress
from cotenant.finetune.state import TrainingState, fingerprint
from cotenant.finetune.tasklets import TrainingPass
from cotenant.finetune.trainer import Trainer
from cotenant.models.decoder import Decoder
from cotenant.models.loading import load_decoder
from cotenant.models.lora import LoraAdapter
from cotenant.models.registry import ResolvedModel, model_path, resolve_model
from cotenant.models.spec import ModelSpec

MICRO_BATCH_TOKENS = 192
EXAMPLE_TOKENS = (24, 96)
NUM_EXAMPLES = 64
LEARNING_RATE = 1e-4

RANDOM_SPEC = ModelSpec(
    family="llama",
    num_layers=6,
    hidden_size=192,
    intermediate_size=512,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=4096,
    max_position_embeddings=2048,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    decoder, name = _load()
    with TemporaryDirectory() as folder:
        spec = _spec(Path(folder), decoder)
        dataset = load_dataset(Path(spec.dataset_path), spec.hyperparameters.max_length, decoder.spec.vocab_size)
    cut, uncut = _cut_steps(decoder, spec, dataset), _uncut_steps(decoder, spec, dataset)
    for _ in range(5):
        cut()
        uncut()
    overheads = []
    for pair in range(arguments.pairs):
        first, second = (cut, uncut) if pair % 2 == 0 else (uncut, cut)
        first_s = second_s = 0.0
        for _ in range(arguments.steps):
            first_s += _timed(first)
            second_s += _timed(second)
        cut_s, uncut_s = (first_s, second_s) if pair % 2 == 0 else (second_s, first_s)
        overheads.append(cut_s / uncut_s - 1)
        print(
            f"pair {pair + 1:2}: cut {cut_s / arguments.steps * 1e3:7.2f} ms/step, "
            f"uncut {uncut_s / arguments.steps * 1e3:7.2f} ms/step, overhead {overheads[-1]:+.2%}"
        )
    print(
        f"{name}: median overhead {statistics.median(overheads):+.2%} over {len(overheads)} pairs of "
        f"{arguments.steps} steps (from {min(overheads):+.2%} to {max(overheads):+.2%}), "
        f"{decoder.spec.num_layers} layers, up to {MICRO_BATCH_TOKENS} tokens per micro-batch, "
        f"{arguments.threads} thread(s), torch {torch.__version__}"
    )


def _load() -> tuple[Decoder, str]:
    if (model_path("tiny") / "config.json").is_file():
        resolved, name = resolve_model(ModelConfig("tiny")), "tiny"
    else:
        resolved, name = ResolvedModel("random", None, RANDOM_SPEC, random_weights=True), "random model"
    return load_decoder(resolved, torch.device("cpu"), torch.float32, seed=0), name


def _spec(folder: Path, decoder: Decoder) -> JobSpec:
    """A job of one micro-batch per step, on random tokens of which the last two thirds count."""
    generator = random.Random(0)
    lengths = [generator.randint(*EXAMPLE_TOKENS) for _ in range(NUM_EXAMPLES)]
    tokens = [generator.randrange(decoder.spec.vocab_size) for _ in range(sum(lengths))]
    weights = [float(position >= length // 3) for length in lengths for position in range(length)]
    offsets = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
    path = folder / "train.safetensors"
    safetensors.torch.save_file(
        {
            "token_ids": torch.tensor(tokens, dtype=torch.int32),
            "weights": torch.tensor(weights),
            "offsets": torch.tensor(offsets),
        },
        path,
    )
    hyper = Hyperparameters(
        n_epochs=1_000_000, batch_size=1, packing=True, max_length=MICRO_BATCH_TOKENS, lr_scheduler_type="constant"
    )
    return JobSpec("bench", "tiny", str(folder), str(path), None, "bench", hyper)


def _state(decoder: Decoder, spec: JobSpec, dataset: Dataset) -> TrainingState:
    hyper = spec.hyperparameters
    adapter = LoraAdapter.trainable(
        decoder.spec, r=hyper.r, alpha=hyper.lora_alpha, target_modules=hyper.target_modules, seed=hyper.seed
    )
    return TrainingState(adapter, spec, fingerprint(spec, dataset))


def _cut_steps(decoder: Decoder, spec: JobSpec, dataset: Dataset) -> Callable[[], None]:
    """A function that runs the next step as tasklets."""
    state = _state(decoder, spec, dataset)
    trainer = Trainer(
        decoder,
        state,
        dataset,
        DataOrder(dataset.lengths, spec.hyperparameters),
        None,
        spec.hyperparameters,
        max_tasklet_tokens=MICRO_BATCH_TOKENS,
        pending=None,
        progress=Progress(time.monotonic),
        on_step=lambda metrics: None,
    )
    trainer.start()

    def run() -> None:
        target = state.step + 1
        while state.step < target:
            assert trainer.upcoming()
            trainer.run_tasklet()

    return run


def _uncut_steps(decoder: Decoder, spec: JobSpec, dataset: Dataset) -> Callable[[], None]:
    """A function that runs the next step, each micro-batch in one go."""
    state = _state(decoder, spec, dataset)
    order, objective = DataOrder(dataset.lengths, spec.hyperparameters), CrossEntropy()

    def run() -> None:
        examples = order.step(state.step)
        total_weight = objective.total_weight(dataset, examples)
        loss = accuracy = 0.0
        for shape in objective.split(dataset, examples, MICRO_BATCH_TOKENS):
            micro_batch = build(dataset, shape, state.adapter, decoder.device)
            training = TrainingPass(decoder, micro_batch)
            for _ in range(decoder.spec.num_layers):
                training.forward()
            sums = training.loss(objective, total_weight)
            for _ in range(decoder.spec.num_layers):
                training.backward()
            training.commit()
            loss += float(sums.weighted_nll) / total_weight
            accuracy += sums.accuracy()
        state.optimizer.clip()
        state.optimizer.step(LEARNING_RATE)
        state.step += 1

    return run


def _timed(step: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    step()
    return time.perf_counter() - start_s


if __name__ == "__main__":
    main()
