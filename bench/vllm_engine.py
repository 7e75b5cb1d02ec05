"""vLLM's decode steps and prompts, measured as `cotenant bench engine` measures ours. Runs where vLLM is installed.

python bench/vllm_engine.py MODEL_FOLDER OUT.json [--batch-sizes 1,8,32,128,256] [--context 545] [--prompt-lengths …]

A decode step is the difference between generating many tokens and few, divided by the difference in tokens; a prompt is
timed from the call to its first token. Medians of several; prefix caching is off, everything else is vLLM's default.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import vllm
from vllm import LLM, SamplingParams

FEW, MANY = 9, 73


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--batch-sizes", type=numbers, default=numbers("1,8,32,128,256"))
    parser.add_argument("--context", type=int, default=545)
    parser.add_argument("--prompt-lengths", type=numbers, default=numbers("512,2048,4000"))
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    start = time.perf_counter()
    llm = LLM(
        arguments.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=16384,
        max_num_seqs=max(arguments.batch_sizes),
    )
    start_s = time.perf_counter() - start
    generator = torch.Generator().manual_seed(0)
    vocab_size = json.loads((Path(arguments.model) / "config.json").read_text())["vocab_size"]

    def seconds(num_prompts: int, prompt_tokens: int, max_tokens: int) -> float:
        shape = (num_prompts, prompt_tokens)
        prompts = torch.randint(0, vocab_size, shape, generator=generator).tolist()
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return time.perf_counter() - begin

    seconds(4, 512, 8)
    decode, prefill = [], []
    for size in arguments.batch_sizes:
        prompt = arguments.context - (MANY - FEW) // 2
        steps = [
            (seconds(size, prompt, MANY) - seconds(size, prompt, FEW)) / (MANY - FEW) * 1e3
            for _ in range(arguments.repeats // 2)
        ]
        decode.append({"batch_size": size, "context": arguments.context, "num_adapters": 0, "step_ms": spread(steps)})
    for length in arguments.prompt_lengths:
        times = [seconds(1, length, 1) * 1e3 for _ in range(arguments.repeats + 2)][2:]
        prefill.append({"num_tokens": length, "prefill_ms": spread(times)})
    label = f"vllm {vllm.__version__}"
    report = {"kind": "engine", "label": label, "start_s": round(start_s, 1), "decode": decode, "prefill": prefill}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    last = len(ordered) - 1
    at = {"p10": ordered[round(0.1 * last)], "p90": ordered[round(0.9 * last)]}
    return {name: round(value, 4) for name, value in {"p50": statistics.median(ordered), **at}.items()}


if __name__ == "__main__":
    main()
