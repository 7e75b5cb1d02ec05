"""On the GPU the built-in model gives the CPU's tokens, and its job the CPU's losses, fused or not."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
import transformers

from cotenant.config import BatchConfig, LoraConfig, ModelConfig
from cotenant.core.plan import Slo, Snapshot
from cotenant.device import create_device
from cotenant.engine.engine import OnlineEngine
from cotenant.models.decoder import Decoder
from cotenant.models.loading import load_decoder
from cotenant.models.registry import resolve_model
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.runtime.executor import Executor
from cotenant.runtime.training import TrainingTenant
from cotenant.scheduler import create_policy
from cotenant.wire.messages import FromWorker, JobMetrics, JobSucceeded
from finetune import support
from finetune.conftest import save_llama
from runtime.cotenancy import request


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_llama(path)
    return path


def load(folder: Path, device: str, dtype: torch.dtype = torch.float32) -> Decoder:
    resolved = resolve_model(ModelConfig(model=str(folder), device=device))
    return load_decoder(resolved, torch.device(device), dtype, seed=0)


def run(decoder: Decoder, device_name: str, job_folder: Path | None, fuse: bool) -> tuple[dict, list[float]]:  # type: ignore[type-arg]
    """Ten greedy requests, with or without a job beside them: tokens by request, and the job's losses."""
    updates: list[FromWorker] = []
    tokens: dict[str, list[int]] = {}
    device = create_device(device_name)
    engine = OnlineEngine(decoder, 64, 4, BatchConfig(8, 64), 128, LoraConfig(), ())
    training = TrainingTenant(device, decoder, None, support.TASKLET_TOKENS, updates.append)
    predictor = LatencyPredictor(device.name, "test")
    executor = Executor(device, decoder, engine, training)
    policy = create_policy("multitask", predictor)
    if job_folder is not None:
        training.start(support.make_spec(job_folder, n_epochs=4))
    deadline_s, iteration = time.monotonic() + 120, -1
    while time.monotonic() < deadline_s:
        iteration += 1
        if iteration % 4 == 0 and iteration < 40:
            engine.add(request(f"r{iteration}", [3 + (iteration + 7 * i) % 200 for i in range(5 + iteration % 9)], 20))
        snapshot = Snapshot(time.monotonic(), Slo(1e6, 1e6), engine.next_shape(), engine.views(), training.view(), fuse)
        plan = executor.begun or policy.plan(snapshot)

        def emit(outputs: list) -> None:  # type: ignore[type-arg]
            for output in outputs:
                tokens.setdefault(output.request_id, []).extend(output.token_ids)

        predictor.observe(executor.execute(plan, emit, lambda: False))
        training.publish()
        if iteration > 40 and not engine.has_work and training.job_id is None:
            break
    engine.check_integrity()
    if job_folder is not None:
        assert any(isinstance(update, JobSucceeded) for update in updates)
    losses = [step.train_loss for update in updates if isinstance(update, JobMetrics) for step in update.steps]
    return tokens, losses


def test_fp32_tokens_and_losses_equal_the_cpus(folder: Path, tmp_path: Path) -> None:
    cpu_tokens, cpu_losses = run(load(folder, "cpu"), "cpu", tmp_path / "cpu", fuse=False)
    torch.backends.cuda.matmul.allow_tf32 = False
    for fuse in (False, True):
        tokens, losses = run(load(folder, "cuda"), "cuda", tmp_path / f"cuda-{fuse}", fuse=fuse)
        assert tokens == cpu_tokens
        assert losses == pytest.approx(cpu_losses, rel=1e-4)
    alone, _ = run(load(folder, "cuda"), "cuda", None, fuse=False)
    assert alone == cpu_tokens


def test_bf16_logits_are_as_near_to_fp32_as_those_of_transformers(folder: Path) -> None:
    token_ids = torch.randint(3, support.VOCAB_SIZE, (1, 64), generator=torch.Generator().manual_seed(1))
    exact = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(token_ids).logits[0]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()(token_ids.cuda())
    decoder = load(folder, "cuda", torch.bfloat16)
    from cotenant.models.batch import Batch, TrainingSegment

    batch = Batch(token_ids[0].cuda(), torch.arange(64).cuda(), (TrainingSegment((64,)),))
    with torch.no_grad():
        ours = decoder.logits(decoder.forward(batch)).cpu()
    error = torch.linalg.norm(ours - exact) / torch.linalg.norm(exact)
    their_error = torch.linalg.norm(theirs.logits[0].float().cpu() - exact) / torch.linalg.norm(exact)
    print(json.dumps({"error": float(error), "their_error": float(their_error)}))
    assert error < 1.5 * their_error + 1e-4
