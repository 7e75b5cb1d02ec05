"""Whole jobs whose layers are captured, validation, DPO's reference and dropout included, beside the same without
graphs."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import transformers

from cotenant.config import ModelConfig
from cotenant.core.job import StepMetrics
from cotenant.core.tasklet import TaskletKind
from cotenant.device import Device, create_device
from cotenant.device.cuda import graphs
from cotenant.finetune import activations
from cotenant.finetune.job import TrainingJob
from cotenant.finetune.preparation import lay_out, prepare
from cotenant.models.decoder import Decoder
from cotenant.models.loading import load_decoder
from cotenant.models.registry import resolve_model
from cotenant.wire.messages import JobMetrics
from finetune import support

WAYS = {
    "supervised": {},
    "dropout": {"lora_dropout": 0.2},
    "recompute": {"lora_dropout": 0.2, "gradient_checkpointing": True},
    "dpo": {"method": "dpo", "batch_size": 4, "lora_dropout": 0.1},
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=support.VOCAB_SIZE, max_position_embeddings=512, initializer_range=0.06, eos_token_id=2,
        bos_token_id=1,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).float().save_pretrained(folder)
    resolved = resolve_model(ModelConfig(model=str(folder), device="cuda"))
    return load_decoder(resolved, torch.device("cuda"), torch.bfloat16, seed=0)


def _steps(decoder: Decoder, folder: Path, changes: dict[str, object]) -> tuple[list[StepMetrics], set[TaskletKind]]:
    """Of a job, and the kinds of its tasklets. Launched as the executor does."""
    examples, validation = support.random_examples(24), support.random_examples(16, seed=5)
    spec = support.make_spec(folder, examples, validation, n_epochs=3, eval_steps=2, learning_rate=1e-3, **changes)
    device = create_device("cuda")
    job = support.make_job(decoder, spec, device=device)
    updates, kinds = [], set()
    while not job.done:
        if job.upcoming():
            kinds.add(job.next_shape.kind)
            _run_tasklet(job, device)
        else:
            job.wait_for_writes()
        updates += job.take_updates()
    job.close()
    return [step for update in updates if isinstance(update, JobMetrics) for step in update.steps], kinds


def _run_tasklet(job: TrainingJob, device: Device) -> None:
    device.wait_for_room()
    device.run_tasklet(job.run_tasklet)


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_a_job_without_graphs(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    captures, capture = itertools.count(), graphs._capture

    def counted(*args: object) -> torch.cuda.CUDAGraph:
        next(captures)
        return capture(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(graphs, "_capture", counted)
    found, kinds = _steps(decoder, tmp_path / "captured", WAYS[way])
    num_captures = next(captures)
    monkeypatch.setattr(activations, "can_capture", lambda decoder: False)
    expected, eager_kinds = _steps(decoder, tmp_path / "eager", WAYS[way])
    assert num_captures > 20
    assert next(captures) == num_captures + 1
    assert TaskletKind.FORWARD_MLP in kinds
    assert kinds.isdisjoint({TaskletKind.FORWARD, TaskletKind.EVAL_FORWARD, TaskletKind.BACKWARD})
    assert TaskletKind.EVAL_FORWARD in eager_kinds
    assert len(found) == len(expected) >= 9
    num_measured = 0
    for step, other in zip(found, expected, strict=True):
        assert step.train_loss == pytest.approx(other.train_loss, rel=2e-2)
        assert step.grad_norm == pytest.approx(other.grad_norm, rel=0.1)
        for name in ("valid_loss", "full_valid_loss"):
            ours, theirs = getattr(step, name), getattr(other, name)
            assert (ours is None) == (theirs is None)
            if ours is not None:
                num_measured += 1
                assert ours == pytest.approx(theirs, rel=2e-2)
    assert num_measured >= 6


def test_what_a_job_goes_on_from_may_lie_on_the_device(decoder: Decoder, tmp_path: Path) -> None:
    """Laid out there by the thread that reads it, a fresh adapter and a checkpoint are what they are otherwise."""
    spec = support.make_spec(tmp_path, save_steps=1, max_steps=4)
    for num_steps in (0, 2):
        device = create_device("cuda")
        job = support.make_job(decoder, spec, device=device)
        while job.step < num_steps:
            if job.runnable:
                _run_tasklet(job, device)
            else:  # what the optimizer changes is being copied
                job.wait_for_writes()
        job.wait_for_writes()
        job.close()
        read = prepare(spec, decoder.spec, support.TASKLET_TOKENS)
        assert read is not None
        assert lay_out(read, spec, decoder, 1 << 20) is read  # there is no room
        there = lay_out(read, spec, decoder, 1 << 33)
        back = there.on_cpu()
        assert back.device_bytes == 0
        assert {matrix.device.type for matrix in there.adapter.parameters()} == {"cuda"}
        assert (there.checkpoint is None) == (num_steps == 0)
        assert there.device_bytes >= 5 * sum(matrix.nbytes for matrix in there.adapter.parameters()) // 2
        assert there.pack is not None
        states = []
        for prepared in (there, back, None):
            again = support.make_job(decoder, spec, device=create_device("cuda"), prepared=prepared)
            assert again.step == num_steps
            states.append(_state(again))
            again.close()
        assert len(states[0]) == (3 if num_steps else 1) * len(there.adapter.parameters())
        assert all(
            torch.equal(mine, other) for state in states[1:] for mine, other in zip(states[0], state, strict=True)
        )


def _state(job: TrainingJob) -> list[torch.Tensor]:
    """What the job trains, and the optimizer's moments."""
    assert job._training is not None
    state = job._training.state
    return [tensor.detach().clone() for tensor in (*state.adapter.parameters(), *state.optimizer.moments().values())]
