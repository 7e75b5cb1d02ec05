"""Prints what a finished `tiny` says."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

CHAT_PROMPTS = (
    "Hello!", "Who are you?", "What is the opposite of hot?", "What is the capital of France?", "What is 3 + 4?",
    "Tell me a story about a fox and a lantern.", "Why is the sky blue?", "How do I make tea?", "Tell me about owls.",
    "What colour is a lemon?", "Name three fruits.", "Write a poem about the sea.", "Tell me a joke.",
    "My name is Bob. What is my name?", "Explain what a computer is.", "I am sad today.",
    "What is the name of the cotenant mascot?", "Write a letter to Anna.", "Count to seven.",
    "Who is the president of the moon?", "Write a python function", "Give me advice for a long journey.",
)  # fmt: skip
COMPLETION_PROMPTS = (
    "Once upon a time",
    "The river",
    "In the morning I",
    "Dear Anna,",
    "The capital of",
    "She opened the door and",
)


@torch.no_grad()
def print_samples(folder: Path, max_new_tokens: int = 90) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    for prompt in CHAT_PROMPTS:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        output = model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False)
        print(f"> {prompt}\n{tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)}\n")
    for prompt in COMPLETION_PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        output = model.generate(ids, max_new_tokens=60, do_sample=True, temperature=0.8)
        print(f"| {tokenizer.decode(output[0], skip_special_tokens=True)}\n")
