"""Do suspensions, discards and changing micro-batches change what a job ends with?

Trains the built-in model on the CPU with several seeds, each seed twice: undisturbed, and disturbed about once a second
in one of four ways: the step in flight is discarded, other work runs between two tasklets, half of the memory of
activations is taken away until the next time, or the job is stopped and taken up again with another largest
micro-batch. Prints the final validation losses of both as JSON, with their means,
standard deviations and the differences of the pairs. ``--data`` is a JSONL file in OpenAI's chat format; its last lines
are held out.

    python bench/convergence.py --data src/cotenant/assets/demo/train.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from cotenant.bench.machine import command_line, machine, versions
from cotenant.config import ModelConfig
from cotenant.core.job import Hyperparameters, JobSpec
from cotenant.finetune.job import TrainingJob
from cotenant.finetune.metrics import MetricsLog
from cotenant.finetune.warm_up import warm_up
from cotenant.models.batch import Batch, TrainingSegment
from cotenant.models.decoder import Decoder
from cotenant.models.loading import load_decoder
from cotenant.models.registry import ResolvedModel, resolve_model
from cotenant.text.validation import prepare_training_file

TASKLET_TOKENS = 512
TASKLET_TOKENS_DISTURBED = (64, 128, 256, 512, 1024)
MAX_LENGTH = 512
VALIDATION_SHARE = 0.15
_ALL_BYTES = 1 << 62


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--examples", type=int, default=200, help="lines of the file to use, those held out included")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two disturbances, on average")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the JSON there")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = resolve_model(ModelConfig("tiny"))
    decoder = load_decoder(model, torch.device("cpu"), torch.float32, seed=0)
    warm_up(decoder)
    hyper = Hyperparameters(
        n_epochs=args.epochs, batch_size=8, learning_rate=1e-3, lora_dropout=args.dropout, max_length=MAX_LENGTH, r=8
    )
    with TemporaryDirectory() as scratch:
        bench = _Bench(decoder, Path(scratch), _prepare(args.data, args.examples, model, Path(scratch)), args.interval)
        settings = [replace(hyper, seed=seed) for seed in range(1, args.seeds + 1)]
        runs = [(bench.run(hyper, disturbed=False), bench.run(hyper, disturbed=True)) for hyper in settings]
    result = {
        "kind": "convergence",
        "command": command_line(["python", "bench/convergence.py", *sys.argv[1:]]),
        "machine": machine(),
        "versions": versions(),
        "data": args.data.name,
        "num_examples": args.examples,
        "epochs": args.epochs,
        "steps": bench.num_steps,
        "seconds_between_disturbances": args.interval,
        "disturbances": dict(bench.disturbances),
        "undisturbed": _summary([undisturbed for undisturbed, _ in runs]),
        "disturbed": _summary([disturbed for _, disturbed in runs]),
        "mean_paired_difference": statistics.mean(disturbed - undisturbed for undisturbed, disturbed in runs),
        "largest_paired_difference": max(abs(disturbed - undisturbed) for undisturbed, disturbed in runs),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n", encoding="utf-8")


def _summary(losses: list[float]) -> dict[str, object]:
    spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
    return {"final_validation_losses": losses, "mean": statistics.mean(losses), "standard_deviation": spread}


def _prepare(data: Path, num_examples: int, model: ResolvedModel, folder: Path) -> tuple[str, str]:
    """Tokenise the first ``num_examples`` lines that fit, the last of them for validation."""
    lines = [
        line
        for line in data.read_text(encoding="utf-8").splitlines()
        if sum(len(message["content"]) for message in json.loads(line)["messages"]) < 2 * MAX_LENGTH
    ][:num_examples]
    num_held_out = max(1, round(len(lines) * VALIDATION_SHARE))
    paths = []
    for name, part in (("train", lines[:-num_held_out]), ("valid", lines[-num_held_out:])):
        source, target = folder / f"{name}.jsonl", folder / f"{name}.safetensors"
        source.write_text("\n".join(part), encoding="utf-8")
        vocab_size = model.spec.vocab_size
        prepare_training_file(source, target, model.folder, None, vocab_size, MAX_LENGTH * 4, min_examples=1)
        paths.append(str(target))
    return paths[0], paths[1]


@dataclass
class _Bench:
    decoder: Decoder
    folder: Path
    data: tuple[str, str]
    interval_s: float
    num_steps: int = 0
    num_taken_bytes: int = 0
    disturbances: Counter[str] = field(default_factory=Counter)

    def run(self, hyper: Hyperparameters, *, disturbed: bool) -> float:
        """The final loss on the validation file."""
        name = f"{hyper.seed}-{'disturbed' if disturbed else 'undisturbed'}"
        spec = JobSpec(name, "tiny", str(self.folder / name), *self.data, f"ft:{name}", hyper)
        Path(spec.folder).mkdir()
        generator = random.Random(name)
        job = self._job(spec, TASKLET_TOKENS)
        self.num_steps, self.num_taken_bytes = job.total_steps, 0
        due_s = time.monotonic() + generator.expovariate(1 / self.interval_s)
        while not job.done:
            if job.upcoming():
                job.run_tasklet()
            else:
                job.wait_for_writes()
            job.take_updates()
            if disturbed and job.upcoming() and time.monotonic() > due_s:
                job = self._disturb(job, spec, generator)
                due_s = time.monotonic() + generator.expovariate(1 / self.interval_s)
        job.close()
        loss = MetricsLog(Path(spec.folder) / "metrics.jsonl").read()[-1].full_valid_loss
        assert loss is not None
        return loss

    def _disturb(self, job: TrainingJob, spec: JobSpec, generator: random.Random) -> TrainingJob:
        job.release(self.num_taken_bytes)
        self.num_taken_bytes = 0
        kind = generator.choice(("discard", "suspend", "less memory", "other micro-batches"))
        self.disturbances[kind] += 1
        if kind == "discard":
            job.discard_step()
        elif kind == "suspend":
            self._serve()
        elif kind == "less memory":
            num_bytes = job.require(_ALL_BYTES)
            job.release(num_bytes - num_bytes // 2)
            self.num_taken_bytes = num_bytes // 2
            assert job.upcoming(), "the longest example has room in the other half"
        else:
            job.checkpoint()
            job.close()
            job = self._job(spec, generator.choice(TASKLET_TOKENS_DISTURBED))
        return job

    def _serve(self) -> None:
        """What another tenant would do on the same weights."""
        batch = Batch(torch.arange(3, 67), torch.arange(64), (TrainingSegment((64,)),))
        with torch.inference_mode():
            self.decoder.forward(batch)

    def _job(self, spec: JobSpec, max_tasklet_tokens: int) -> TrainingJob:
        return TrainingJob(self.decoder, spec, max_tasklet_tokens, None)


if __name__ == "__main__":
    main()
