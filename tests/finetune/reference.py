"""Training as PEFT and TRL define it, written out with transformers, peft and torch's own optimizer and schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import peft
import torch
import torch.nn.functional as F
import transformers

from cotenant.core.job import Hyperparameters
from cotenant.finetune.dataset import Dataset
from cotenant.finetune.order import DataOrder

# Of a step's examples, by number: the parts that add up to its loss, each with its own graph, and what else to compare.
Loss = Callable[[peft.PeftModel, Dataset, Sequence[int]], tuple[list[torch.Tensor], dict[str, float]]]
ACCUMULATED = 2  # examples, or pairs, of one forward pass


def load(model_folder: Path, adapter_folder: Path) -> peft.PeftModel:
    """The base in float32 with a trainable adapter, dropout off."""
    base = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, adapter_folder, is_trainable=True).eval()


def logits(model: peft.PeftModel, token_ids: Sequence[int]) -> torch.Tensor:
    """[tokens, vocab] of one sequence."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]


def scaled_matrices(model: peft.PeftModel) -> dict[str, torch.Tensor]:
    """The adapter's matrices by the names in its file; each B times its module's factor, as the model multiplies it."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, peft.tuners.lora.LoraLayer)}
    found = peft.get_peft_model_state_dict(model)
    for name, layer in layers.items():
        found[f"{name}.lora_B.weight"] = found[f"{name}.lora_B.weight"] * layer.scaling["default"]
    return found


def log_probs(model: torch.nn.Module, dataset: Dataset, examples: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a padded batch: each next token's log-probability, and its weight; both [examples, longest - 1]."""
    parts = [dataset[index] for index in examples]
    longest = max(len(part.token_ids) for part in parts)
    token_ids = torch.stack([F.pad(part.token_ids.long(), (0, longest - len(part.token_ids))) for part in parts])
    mask = torch.stack([F.pad(torch.ones(len(part.token_ids)), (0, longest - len(part.token_ids))) for part in parts])
    weights = torch.stack([F.pad(part.weights, (0, longest - len(part.weights))) for part in parts])
    logits = model(input_ids=token_ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    nll = F.cross_entropy(logits.flatten(0, 1), token_ids[:, 1:].flatten(), reduction="none")
    return -nll.view(len(parts), -1), weights[:, 1:]


def sft_loss(
    model: peft.PeftModel, dataset: Dataset, examples: Sequence[int]
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """SFTTrainer: the mean over all target tokens of the step (``num_items_in_batch``)."""
    total_weight = sum(dataset.loss_weights[index] for index in examples)
    parts = []
    for start in range(0, len(examples), ACCUMULATED):
        logps, weights = log_probs(model, dataset, examples[start : start + ACCUMULATED])
        parts.append(-(logps * weights).sum() / total_weight)
    return parts, {}


def dpo_loss(beta: float, label_smoothing: float) -> Loss:
    """DPOTrainer with ``loss_type="sigmoid"``: the mean over the pairs of the step."""

    def loss(
        model: peft.PeftModel, dataset: Dataset, examples: Sequence[int]
    ) -> tuple[list[torch.Tensor], dict[str, float]]:
        num_pairs = len(examples) // 2
        parts, rewards = [], []
        for start in range(0, len(examples), 2 * ACCUMULATED):
            batch = [*examples[start : start + 2 * ACCUMULATED : 2], *examples[start + 1 : start + 2 * ACCUMULATED : 2]]
            logps, mask = log_probs(model, dataset, batch)
            chosen_logps, rejected_logps = (logps * mask).sum(-1).chunk(2)
            with torch.no_grad(), model.disable_adapter():
                ref_logps, _ = log_probs(model, dataset, batch)
            ref_chosen_logps, ref_rejected_logps = (ref_logps * mask).sum(-1).chunk(2)
            logits = (chosen_logps - rejected_logps) - (ref_chosen_logps - ref_rejected_logps)
            losses = (
                -F.logsigmoid(beta * logits) * (1 - label_smoothing) - F.logsigmoid(-beta * logits) * label_smoothing
            )
            parts.append(losses.sum() / num_pairs)
            chosen = (beta * (chosen_logps - ref_chosen_logps)).detach()
            rejected = (beta * (rejected_logps - ref_rejected_logps)).detach()
            rewards.append(torch.stack([chosen, rejected, chosen_logps.detach(), rejected_logps.detach()]))
        chosen, rejected, logps_chosen, logps_rejected = torch.cat(rewards, dim=1)
        return parts, {
            "chosen": chosen.mean().item(),
            "rejected": rejected.mean().item(),
            "accuracies": (chosen > rejected).float().mean().item(),
            "margins": (chosen - rejected).mean().item(),
            "logps_chosen": logps_chosen.mean().item(),
            "logps_rejected": logps_rejected.mean().item(),
        }

    return loss


def train(
    model: peft.PeftModel, dataset: Dataset, hyper: Hyperparameters, loss: Loss
) -> list[tuple[float, float, float, dict[str, float]]]:
    """(loss, gradient norm, learning rate, other figures) of each step; the model is trained in place."""
    order = DataOrder(dataset.lengths, hyper)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=hyper.learning_rate, eps=hyper.adam_epsilon, weight_decay=hyper.weight_decay
    )
    schedule = transformers.get_scheduler(hyper.lr_scheduler_type, optimizer, hyper.warmup_steps, order.total_steps)
    figures = []
    for step in range(order.total_steps):
        parts, others = loss(model, dataset, order.step(step))
        for part in parts:
            part.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, hyper.max_grad_norm).item()
        figures.append((sum(part.item() for part in parts), norm, schedule.get_last_lr()[0], others))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return figures
