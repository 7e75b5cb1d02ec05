"""What vLLM answers to prompts with a LoRA adapter on. Runs where vLLM is installed; see bench/adapter_in_vllm.py.

python bench/vllm_adapter.py MODEL_FOLDER ADAPTER_FOLDER PROMPTS.json OUT.json --max-tokens 24 --max-lora-rank 16

PROMPTS.json: a list of prompts, each a list of token ids. OUT.json: vLLM's ``version`` and ``token_ids``, the greedy
answers in the order of the prompts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import vllm
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("adapter")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--max-lora-rank", type=int, required=True)
    arguments = parser.parse_args()
    prompts: list[list[int]] = json.loads(arguments.prompts.read_text())
    llm = LLM(
        arguments.model,
        dtype=arguments.dtype,
        skip_tokenizer_init=True,
        enable_lora=True,
        max_loras=1,
        max_lora_rank=arguments.max_lora_rank,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=16,
        gpu_memory_utilization=0.2,
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens, ignore_eos=True, detokenize=False),
        use_tqdm=False,
        lora_request=LoRARequest("adapter", 1, arguments.adapter),
    )
    report = {"version": vllm.__version__, "token_ids": [list(output.outputs[0].token_ids) for output in outputs]}
    arguments.out.write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
