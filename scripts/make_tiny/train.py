"""Trains `tiny` from nothing on the generated text."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from scripts.make_tiny.corpus import Document, documents
from scripts.make_tiny.tokenizer import BEGIN, BEGIN_ID, END, END_ID, PAD_ID
from transformers import LlamaConfig, LlamaForCausalLM

logger = logging.getLogger(__name__)

# Rows start with the beginning of a document. The longer rows come last: they are for the late positions.
_ROW_TOKENS = ((0.75, 256), (0.90, 512), (1.0, 1024))
_LOG_EVERY_STEPS = 50


@dataclass(frozen=True)
class Recipe:
    """How `tiny` is made; together with the versions, the machine and the threads, this decides every byte."""

    steps: int = 3400
    tokens_per_step: int = 2048
    learning_rate: float = 4e-3
    matrix_learning_rate: float = 5e-3
    warmup_steps: int = 100
    weight_decay: float = 0.05
    seed: int = 17
    num_threads: int = 1
    precision: str = "bfloat16"  # of the matrix products; or float32
    vocab_size: int = 2048
    tokenizer_documents: int = 30_000


def model_config(vocab_size: int) -> dict[str, Any]:
    """``config.json``, readable by transformers 4 and 5 and by every server that knows Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 192,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 32,
        "intermediate_size": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": vocab_size,
        "bos_token_id": BEGIN_ID,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "dtype": "bfloat16",
    }


def render(document: Document, tokenizer: Any) -> str:
    """The document as the model sees it, with the marks of begin, roles and end."""
    if isinstance(document, str):
        return BEGIN + document + END
    messages, tools = document
    text: str = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False)
    return text


def _encoded(seed: int, tokenizer: Any) -> Iterator[list[int]]:
    for document in documents(seed):
        yield tokenizer.backend_tokenizer.encode(render(document, tokenizer), add_special_tokens=False).ids


def _row(source: Iterator[list[int]], num_tokens: int) -> list[int]:
    row: list[int] = []
    while len(row) < num_tokens:
        row += next(source)
    return row[:num_tokens]


def _batch(source: Iterator[list[int]], row_tokens: int, num_tokens: int) -> torch.Tensor:
    rows = [_row(source, row_tokens) for _ in range(max(1, num_tokens // row_tokens))]
    return torch.tensor(rows)  # [rows, row_tokens]


def _row_tokens(progress: float) -> int:
    return next(tokens for until, tokens in _ROW_TOKENS if progress < until)


def _loss(model: LlamaForCausalLM, token_ids: torch.Tensor, precision: str) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16"):
        logits = model(input_ids=token_ids, use_cache=False).logits  # [rows, row_tokens, vocab]
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), token_ids[:, 1:].flatten())


def _optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embeddings and the norms.

    With Muon (Jordan et al. 2024, in torch since 2.9) the loss falls in about half the steps of AdamW alone.
    """
    matrices = [weight for weight in model.model.layers.parameters() if weight.dim() == 2]
    chosen = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in chosen]
    return [
        torch.optim.Muon(
            matrices, lr=recipe.matrix_learning_rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _rate(step: int, recipe: Recipe) -> float:
    """The learning rate as a share of its peak: linear warm-up, then a cosine down to zero."""
    warmup = min(1.0, (step + 1) / recipe.warmup_steps)
    return warmup * 0.5 * (1 + math.cos(math.pi * step / recipe.steps))


def train(tokenizer: Any, recipe: Recipe) -> LlamaForCausalLM:
    """A model trained for ``recipe.steps`` steps, in float32 on the CPU."""
    torch.set_num_threads(recipe.num_threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(LlamaConfig(**{**model_config(len(tokenizer)), "dtype": "float32"}))
    model.train()
    optimizers = _optimizers(model, recipe)
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: _rate(step, recipe)) for one in optimizers]
    source = _encoded(recipe.seed, tokenizer)
    started = time.perf_counter()
    for step in range(recipe.steps):
        token_ids = _batch(source, _row_tokens(step / recipe.steps), recipe.tokens_per_step)
        loss = _loss(model, token_ids, recipe.precision)
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if step % _LOG_EVERY_STEPS == 0 or step + 1 == recipe.steps:
            logger.info(
                "step %d of %d, loss %.4f, %.0f s", step + 1, recipe.steps, loss.item(), time.perf_counter() - started
            )
    return model.eval()


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokenizer: Any, recipe: Recipe, num_batches: int = 20) -> float:
    """Mean loss per token on text that the training did not see, from the same generator with another seed."""
    source = _encoded(recipe.seed + 1_000_003, tokenizer)
    losses = [_loss(model, _batch(source, 256, recipe.tokens_per_step), "float32").item() for _ in range(num_batches)]
    return sum(losses) / len(losses)
