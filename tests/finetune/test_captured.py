"""Layers at fixed addresses, in halves: what GPUs capture runs eagerly here, and gives what eager layers give."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
import transformers

from cotenant.core.job import StepMetrics
from cotenant.core.tasklet import TaskletKind, runs_of
from cotenant.finetune import activations
from cotenant.finetune.captured import BACKWARD_PARTS, FORWARD_PARTS, CapturedLayers
from cotenant.models.decoder import Decoder
from finetune import support
from finetune.captured_layers import DPO, DROPOUT, VALIDATION, Lagging, Make, flat, run_to_end

PATTERNS = {"rank_pattern": {"q_proj": 2, "down_proj": 3}, "alpha_pattern": {"up_proj": 3.0}, "use_rslora": True}
SOME_MODULES = {"target_modules": ("k_proj", "v_proj", "gate_proj")}
DPO_DROPOUT = {**DPO, **PATTERNS, "lora_dropout": 0.3}


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def any_decoder(request: pytest.FixtureRequest, tmp_path: Path, decoder: Decoder) -> Decoder:
    """With and without biases, and norms of queries and keys."""
    if request.param == "llama":
        return decoder
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": support.VOCAB_SIZE,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    if request.param == "qwen2":
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.q_proj.bias)
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(head_dim=16, **sizes))
    model.float().save_pretrained(tmp_path / "model")
    return support.load(tmp_path / "model")


def _measured(step: StepMetrics) -> list[float]:
    """All that was measured in a step and after it."""
    figures = [step.train_loss, step.grad_norm, step.train_mean_token_accuracy]
    for loss in (step.valid_loss, step.full_valid_loss, step.valid_mean_token_accuracy):
        figures += [] if loss is None else [loss]
    for preference in (step.preference, step.valid_preference, step.full_valid_preference):
        figures += [] if preference is None else dataclasses.astuple(preference)
    return figures


@pytest.mark.parametrize(
    "changes",
    [{}, {"gradient_checkpointing": True}, {"packing": True}, DPO, PATTERNS, SOME_MODULES, DROPOUT, DPO_DROPOUT],
    ids=["plain", "recompute", "packing", "dpo", "patterns", "modules", "dropout", "dpo-dropout"],
)
def test_the_adapter_is_that_of_eager_layers(
    any_decoder: Decoder, captured: Make, tmp_path: Path, changes: dict[str, object]
) -> None:
    job = captured(any_decoder, tmp_path / "captured", max_steps=6, **changes)
    kinds = {run.shape.kind for run in runs_of(job.upcoming())}
    assert kinds.isdisjoint({TaskletKind.FORWARD, TaskletKind.EVAL_FORWARD, TaskletKind.BACKWARD})
    steps = run_to_end(job)
    spec = support.make_spec(tmp_path / "eager", validation=VALIDATION, eval_steps=3, max_steps=6, **changes)
    expected_steps = run_to_end(support.make_job(any_decoder, spec))
    assert len(steps) == 6
    assert any(step.valid_loss is not None for step in steps)
    for found_step, expected_step in zip(steps, expected_steps, strict=True):
        assert _measured(found_step) == pytest.approx(_measured(expected_step), rel=1e-4, abs=1e-6)
    found, expected = flat(tmp_path / "captured"), flat(tmp_path / "eager")
    assert float((found - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.parametrize("changes", [{}, DPO, DROPOUT], ids=["plain", "dpo", "dropout"])
def test_discarding_at_random_points_changes_no_bit(
    decoder: Decoder, captured: Make, tmp_path: Path, changes: dict[str, object]
) -> None:
    run_to_end(captured(decoder, tmp_path / "undisturbed", max_steps=12, **changes))
    job = captured(decoder, tmp_path / "discarded", max_steps=12, **changes)
    generator, kinds = random.Random(1), set()
    while not job.done:
        if not job.upcoming():
            job.wait_for_writes()
        elif generator.random() < 0.9:
            support.run(job, generator.randint(0, sum(cycle.num_tasklets for cycle in job.upcoming()) - 1))
            support.wait_for_copy(job)
            kinds.add(job.next_shape.kind)
            job.discard_step()
            assert not job.in_flight
        else:
            support.run_step(job)
        job.take_updates()
    job.close()
    assert kinds >= {*FORWARD_PARTS, *BACKWARD_PARTS}
    assert support.adapter_bytes(tmp_path / "discarded") == support.adapter_bytes(tmp_path / "undisturbed")


@pytest.mark.parametrize("limit", [{"_MAX_FRAMES": 2}, {"_MAX_GRAPHS": 250}], ids=["frames", "graphs"])
def test_frames_beyond_the_limit_are_let_go_of(
    decoder: Decoder, captured: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: dict[str, int]
) -> None:
    """As if each had 100 graphs."""
    run_to_end(captured(decoder, tmp_path / "undisturbed", max_steps=6))
    monkeypatch.setattr(CapturedLayers, "num_graphs", 100)
    for name, value in limit.items():
        monkeypatch.setattr(activations, name, value)
    device = Lagging(2)
    job = captured(decoder, tmp_path / "few", device=device, max_steps=6)
    frames, most = job._training.trainer._activations._frames, 0  # type: ignore[union-attr]
    while not job.done:
        if job.upcoming():
            support.run(job, 1)
            most = max(most, len(frames))
        else:
            job.wait_for_writes()
        job.take_updates()
    job.close()
    assert most == (2 if "_MAX_FRAMES" in limit else 3)
    assert device.num_waits > 3
    assert support.adapter_bytes(tmp_path / "few") == support.adapter_bytes(tmp_path / "undisturbed")


def test_a_job_goes_on_from_its_checkpoint(decoder: Decoder, captured: Make, tmp_path: Path) -> None:
    run_to_end(captured(decoder, tmp_path / "whole", max_steps=9))
    job = captured(decoder, tmp_path / "parts", max_steps=9)
    while job.step < 4:
        support.run_step(job)
    support.run(job, 5)
    job.checkpoint()
    job.close()
    run_to_end(captured(decoder, tmp_path / "parts", max_steps=9))
    assert support.adapter_bytes(tmp_path / "parts") == support.adapter_bytes(tmp_path / "whole")
