"""Neither tenant's results change because of the other, under any policy."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from cotenant.config import POLICIES
from cotenant.core.request import Request
from cotenant.models.decoder import Decoder
from cotenant.wire.messages import JobFailed, JobSucceeded
from finetune import support
from finetune.conftest import save_llama
from runtime.cotenancy import adapter_of, request, run
from undisturbed import until_undisturbed


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("llama")
    save_llama(folder)
    return support.load(folder)


def arrivals() -> dict[int, Request]:
    """Twelve requests that overlap, in prompts of 3 to 25 tokens."""
    return {5 * n: request(f"r{n}", [3 + (7 * n + i) % 200 for i in range(3 + 2 * n)], 12 + n) for n in range(12)}


@pytest.fixture(scope="module")
def undisturbed(decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[int]], bytes]:
    """Tokens of the requests without a job, and the adapter of the job without requests."""
    folder = tmp_path_factory.mktemp("alone")
    alone = run(decoder, "multitask", {}, support.make_spec(folder, n_epochs=4))
    assert any(isinstance(update, JobSucceeded) for update in alone.updates)
    return run(decoder, "inference-only", arrivals(), None).tokens, adapter_of(folder)


# `adaptive` holds prompts for as long as the target lets it, by when this job has ended.
SHORT = ("adaptive", 100.0)


@pytest.mark.parametrize(
    ("policy", "ttft_ms"), [*((policy, 10_000.0) for policy in POLICIES if policy != "inference-only"), SHORT]
)
@pytest.mark.parametrize("interrupt_every", [0, 1, 3])
def test_tokens_and_adapter_are_those_of_undisturbed_runs(
    decoder: Decoder,
    undisturbed: tuple[dict[str, list[int]], bytes],
    tmp_path: Path,
    policy: str,
    ttft_ms: float,
    interrupt_every: int,
) -> None:
    # Tasklets beside batches; without partitions of the SMs, as here, some have none.
    shares = policy not in ("temporal", "lifecycle", "fineinfer", "harli", "static")
    if interrupt_every == 1 and not shares:
        pytest.skip("interrupted at every look it would wait for ever, as it should")
    if interrupt_every == 1 and policy in ("multitask", "adaptive", "chunked", "llmstation"):
        interrupt_every = 2
    holds = policy == "adaptive" and (policy, ttft_ms) != SHORT
    # Running requests have time for what is held, also on a machine that goes unevenly.
    tpot_ms = 2000.0 if holds else 200.0

    # What a policy chooses follows what it measures.
    def once(attempt: int) -> str | None:
        folder = tmp_path / str(attempt)
        outcome = run(
            decoder, policy, arrivals(), support.make_spec(folder, n_epochs=4),
            interrupt_every=interrupt_every, ttft_ms=ttft_ms, tpot_ms=tpot_ms,
        )  # fmt: skip
        assert outcome.tokens == undisturbed[0]
        assert adapter_of(folder) == undisturbed[1]
        if holds:
            return None if outcome.num_held > 5 else "nothing was held"
        return None if not shares or outcome.num_mixed_iterations > 5 else "nothing was co-executed"

    until_undisturbed(once)


@pytest.mark.parametrize(("policy", "ttft_ms"), [("multitask", 10_000.0), SHORT])
def test_fused_forwards_change_no_token_and_the_adapter_by_rounding_alone(
    decoder: Decoder, undisturbed: tuple[dict[str, list[int]], bytes], tmp_path: Path, policy: str, ttft_ms: float
) -> None:
    alone = safetensors.torch.load(undisturbed[1])

    def once(attempt: int) -> str | None:
        folder = tmp_path / str(attempt)
        outcome = run(
            decoder, policy, arrivals(), support.make_spec(folder, n_epochs=4), ttft_ms=ttft_ms, fuse=True
        )  # fmt: skip
        assert outcome.tokens == undisturbed[0]
        fused = safetensors.torch.load(adapter_of(folder))
        for name, tensor in alone.items():
            assert torch.linalg.norm(fused[name] - tensor) <= 1e-4 * torch.linalg.norm(tensor), name
        return None if outcome.num_fused > 10 else "nothing was fused"

    until_undisturbed(once)


DPO = {"method": "dpo", "batch_size": 3, "n_epochs": 5}


def test_a_dpo_job_and_its_neighbours_are_undisturbed(
    decoder: Decoder, undisturbed: tuple[dict[str, list[int]], bytes], tmp_path: Path
) -> None:
    """The reference runs beside the requests, and only the forwards that train run inside their batch."""
    run(decoder, "multitask", {}, support.make_spec(tmp_path / "alone", **DPO))
    outcome = run(decoder, "multitask", arrivals(), support.make_spec(tmp_path / "beside", **DPO), interrupt_every=3)
    assert outcome.tokens == undisturbed[0]
    assert adapter_of(tmp_path / "beside") == adapter_of(tmp_path / "alone")

    def fused_once(attempt: int) -> str | None:
        spec = support.make_spec(tmp_path / f"fused-{attempt}", **DPO)
        fused = run(decoder, "multitask", arrivals(), spec, fuse=True)
        assert fused.tokens == undisturbed[0]
        return None if fused.num_fused > 10 else "nothing was fused"

    until_undisturbed(fused_once)


def test_a_job_that_diverges_fails_alone(decoder: Decoder, tmp_path: Path) -> None:
    spec = support.make_spec(tmp_path, learning_rate=1e30, max_grad_norm=1e30, warmup_steps=0, n_epochs=20)
    outcome = run(decoder, "multitask", arrivals(), spec)
    failures = [update for update in outcome.updates if isinstance(update, JobFailed)]
    assert len(failures) == 1
    assert "not finite at step" in failures[0].message
    assert outcome.tokens == run(decoder, "inference-only", arrivals(), None).tokens
