"""Does an adapter that a job exports give the same tokens here, in PEFT and in vLLM?

python bench/adapter_in_vllm.py --json bench/results/adapter_h200.json [--patterns] [--vllm-site DIR]

Makes a small random Llama, lets a job memorise a dozen sequences of random tokens, so that no answer hangs on the last
bits of two nearly equal logits, and has each of the three continue the beginnings of those sequences greedily with the
exported adapter on. Exits with 1 if a token differs, or if an answer is the one that the model gives without the
adapter. With --patterns some modules have another rank and alpha, and the scale is rsLoRA's. vLLM runs in a process of
its own (bench/vllm_adapter.py), from the environment or from the folder that --vllm-site names. Without a GPU:
`--device cpu --no-vllm`, in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from cotenant.bench.machine import command_line, machine, versions
from cotenant.config import CacheConfig, LoraConfig, ModelConfig, ServerConfig
from cotenant.core.job import Hyperparameters, JobSpec
from cotenant.core.request import AdapterRef, Request, SamplingParams
from cotenant.finetune.job import TrainingJob
from cotenant.runtime.build import Serving, build_serving
from cotenant.text.examples import EncodedExample, write_examples
from cotenant.wire.messages import JobFailed, JobMetrics

NUM_PROMPTS = 12
NUM_TOKENS = 24  # of an answer
RANK = 16
PATTERNS = {"rank_pattern": {"q_proj": 8, "up_proj": 24}, "alpha_pattern": {"down_proj": 50.0}, "use_rslora": True}
MAX_RANK = 32
MODEL = LlamaConfig(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,
    vocab_size=512,
    max_position_embeddings=512,
    initializer_range=0.06,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)

Tokens = list[list[int]]  # of each prompt, or of its answer


@dataclass(frozen=True, slots=True)
class Trained:
    """The exported adapter's folder, the optimizer steps it took, and the last one's loss."""

    folder: Path
    num_steps: int
    loss: float


def main() -> None:
    arguments = parse()
    prompts, continuations = sequences()
    with TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        torch.manual_seed(0)
        LlamaForCausalLM(MODEL).bfloat16().save_pretrained(model)
        serving = build_serving(
            ServerConfig(
                ModelConfig(str(model), device=arguments.device),
                cache=CacheConfig(num_pages=256),
                lora=LoraConfig(max_loras=1, max_lora_rank=MAX_RANK),
            )
        )
        dtype = str(serving.decoder.dtype).removeprefix("torch.")
        trained = train(serving, Path(scratch) / "job", prompts, continuations, arguments.steps, arguments.patterns)
        base = answers_here(serving, prompts, None)
        answers = {"cotenant": answers_here(serving, prompts, AdapterRef("memorised", str(trained.folder)))}
        answers["peft"], margin = answers_of_peft(model, trained.folder, prompts, serving)
        used = {**versions(), **{name: metadata.version(name) for name in ("transformers", "peft")}}
        if not arguments.no_vllm:
            found = answers_of_vllm(model, trained.folder, prompts, dtype, Path(scratch), arguments.vllm_site)
            answers["vllm"], used["vllm"] = found["token_ids"], found["version"]
    problems = differences(answers, base)
    report = {
        "kind": "adapter",
        "command": command_line(["python", "bench/adapter_in_vllm.py", *sys.argv[1:]]),
        "machine": machine(),
        "versions": used,
        "device": serving.device.name,
        "dtype": dtype,
        "model": {name: getattr(MODEL, name) for name in ("hidden_size", "num_hidden_layers", "head_dim")},
        "r": RANK,
        "patterns": PATTERNS if arguments.patterns else None,
        "num_steps": trained.num_steps,
        "final_loss": round(trained.loss, 5),
        "num_prompts": NUM_PROMPTS,
        "num_tokens": NUM_TOKENS,
        "smallest_margin": round(margin, 3),
        "num_memorised": num_equal(answers["cotenant"], continuations),
        "num_as_base": num_equal(answers["cotenant"], base),
        "num_equal": {name: num_equal(answers["cotenant"], theirs) for name, theirs in answers.items()},
        "passed": not problems,
        "problems": problems,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    if problems:
        raise SystemExit(1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the report there")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps, each over all sequences")
    parser.add_argument("--patterns", action="store_true", help="other ranks and alphas for some modules, and rsLoRA")
    parser.add_argument("--no-vllm", action="store_true")
    parser.add_argument("--vllm-site", default="", help="a folder of packages for vLLM, before all others")
    return parser.parse_args()


def sequences() -> tuple[Tokens, Tokens]:
    """Prompts of several lengths, and what the job teaches the model to go on with."""
    generator = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [generator.randrange(MODEL.vocab_size) for _ in range(count)]

    return [tokens(5 + index) for index in range(NUM_PROMPTS)], [tokens(NUM_TOKENS) for _ in range(NUM_PROMPTS)]


def train(
    serving: Serving, folder: Path, prompts: Tokens, continuations: Tokens, num_steps: int, patterns: bool
) -> Trained:
    """Run a job as the worker does, on the weights that serve."""
    folder.mkdir()
    examples = [
        EncodedExample(
            np.array(prompt + answer, dtype=np.int32),
            np.repeat(np.array([0.0, 1.0], dtype=np.float32), (len(prompt), len(answer))),
        )
        for prompt, answer in zip(prompts, continuations, strict=True)
    ]
    write_examples(folder / "train.safetensors", examples)
    hyper = Hyperparameters(
        n_epochs=num_steps,
        batch_size=len(examples),
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        max_length=64,
        r=RANK,
        lora_alpha=2.0 * RANK,
        save_steps=num_steps,
        **(PATTERNS if patterns else {}),
    )
    spec = JobSpec("memorise", "base", str(folder), str(folder / "train.safetensors"), None, "memorised", hyper)
    device = serving.device
    job = TrainingJob(serving.decoder, spec, serving.tasklet_tokens, None, device=device)
    losses: list[float] = []
    while not job.done:
        if job.upcoming():
            device.wait_for_room()
            device.run_tasklet(job.run_tasklet)
        else:
            job.wait_for_writes()
        for update in job.take_updates():
            if isinstance(update, JobFailed):
                raise SystemExit(f"the job failed: {update.message}")
            if isinstance(update, JobMetrics):
                losses += [step.train_loss for step in update.steps]
    job.close()
    assert job.finished_path is not None
    return Trained(Path(job.finished_path), len(losses), losses[-1])


def answers_here(serving: Serving, prompts: Tokens, adapter: AdapterRef | None) -> Tokens:
    engine, device = serving.engine, serving.device
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    answers: dict[str, list[int]] = {f"{adapter}-{index}": [] for index in range(len(prompts))}
    for name, prompt in zip(answers, prompts, strict=True):
        engine.add(Request(name, tuple(prompt), sampling, time.monotonic(), adapter))
    while engine.has_work:
        with device.online():
            outputs = engine.iterate(num_ahead=int(device.overlaps)).outputs
        for output in outputs:
            answers[output.request_id] += output.token_ids
        for name, error in engine.take_failures():
            raise SystemExit(f"{name}: {error}")
    return list(answers.values())


def answers_of_peft(model: Path, adapter: Path, prompts: Tokens, serving: Serving) -> tuple[Tokens, float]:
    """The answers, and by how much the likeliest token's logit was ahead of the next one's at least."""
    device = serving.device.torch_device
    base = AutoModelForCausalLM.from_pretrained(model, dtype=serving.decoder.dtype).to(device)
    tuned = PeftModel.from_pretrained(base, adapter).eval()
    answers, margins = [], []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        generated = tuned.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        answers.append(generated.sequences[0, len(prompt) :].tolist())
        first, second = torch.cat(generated.logits).float().topk(2).values.unbind(dim=1)
        margins.append(float((first - second).min()))
    return answers, min(margins)


def answers_of_vllm(model: Path, adapter: Path, prompts: Tokens, dtype: str, work: Path, site: str) -> dict[str, Any]:
    """``token_ids`` of the answers and vLLM's ``version``."""
    asked, answered = work / "prompts.json", work / "answers.json"
    asked.write_text(json.dumps(prompts))
    environment = {**os.environ, "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
    if site:
        environment["PYTHONPATH"] = str(Path(site).resolve())
    script = (Path(__file__).parent / "vllm_adapter.py").resolve()
    command = [sys.executable, str(script), str(model), str(adapter), str(asked), str(answered)]
    command += ["--dtype", dtype, "--max-tokens", str(NUM_TOKENS), "--max-lora-rank", str(MAX_RANK)]
    if subprocess.run(command, env=environment, cwd=work, check=False).returncode != 0:
        raise SystemExit("vLLM gave no answers; what it said stands above")
    found: dict[str, Any] = json.loads(answered.read_text())
    return found


def differences(answers: dict[str, Tokens], base: Tokens) -> list[str]:
    """Where another's answer is not ours, and where ours is the base model's."""
    ours = answers["cotenant"]
    problems = []
    for name, theirs in answers.items():
        for index, (answer, expected) in enumerate(zip(theirs, ours, strict=True)):
            if answer != expected:
                place = next(at for at in range(NUM_TOKENS) if answer[at : at + 1] != expected[at : at + 1])
                problems.append(f"prompt {index}: {name}'s answer differs from ours at token {place}")
    problems += [
        f"prompt {index}: the adapter changed nothing"
        for index, (answer, without) in enumerate(zip(ours, base, strict=True))
        if answer == without
    ]
    return problems


def num_equal(first: Tokens, second: Tokens) -> int:
    return sum(answer == other for answer, other in zip(first, second, strict=True))


if __name__ == "__main__":
    main()
