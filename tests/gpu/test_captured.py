"""Captured layers give the gradients that eager ones give, and their memory comes and goes."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cotenant.config import ModelConfig
from cotenant.core.job import LINEAR_MODULES, Hyperparameters
from cotenant.core.tasklet import TaskletKind
from cotenant.device import Device, create_device
from cotenant.device.cuda.graphs import capture_graph
from cotenant.finetune.activations import Activations, can_capture
from cotenant.finetune.dataset import Dataset
from cotenant.finetune.objective import CrossEntropy
from cotenant.finetune.optimizer import Optimizer
from cotenant.finetune.step import TrainingStep
from cotenant.models.decoder import Decoder
from cotenant.models.loading import load_decoder
from cotenant.models.lora import LoraAdapter
from cotenant.models.registry import resolve_model
from cotenant.models.training_pack import TrainingPack
from cotenant.runtime.finetune_bench import open_bench
from cotenant.runtime.finetune_workload import Workload

VOCAB_SIZE = 512
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "initializer_range": 0.06,
    "bos_token_id": None,
    "eos_token_id": None,
}
RAGGED = [37, 5, 200, 128, 64, 90, 17]
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(head_dim=128, **SIZES)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(sliding_window=50, **SIZES)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make()
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3)
        found[name] = tmp_path_factory.mktemp(name)
        model.float().save_pretrained(found[name])
    return found


def _load(folder: Path, device: str, dtype: torch.dtype) -> Decoder:
    resolved = resolve_model(ModelConfig(model=str(folder), device=device))
    return load_decoder(resolved, torch.device(device), dtype, seed=0)


def _adapter(decoder: Decoder) -> LoraAdapter:
    adapter = LoraAdapter.trainable(
        decoder.spec, r=8, alpha=16.0, target_modules=LINEAR_MODULES, seed=0, rank_pattern={"k_proj": 4},
        device=decoder.device,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    for _, b in adapter.weights.values():
        b.data.copy_(torch.randn(b.shape, generator=generator) * 0.02)
    return adapter


def _dataset(lengths: list[int]) -> Dataset:
    generator = torch.Generator().manual_seed(2)
    total = sum(lengths)
    token_ids = torch.randint(0, VOCAB_SIZE, (total,), generator=generator, dtype=torch.int32)
    weights = (torch.rand(total, generator=generator) < 0.8).float()
    offsets = torch.tensor([0, *itertools.accumulate(lengths)])
    weights[offsets[:-1]] = 0.0
    return Dataset(token_ids, weights, offsets, max(lengths))


def _gradient(
    decoder: Decoder,
    lengths: list[int],
    activations: bool,
    *,
    num_recomputed: int = 0,
    discards: int = 0,
    takes_memory: bool = False,
) -> torch.Tensor:
    """Of a whole step over these sequences in micro-batches of at most 256 tokens, at every LoRA matrix, on the CPU.
    The step runs three times: at first eagerly, then it is captured, then replayed."""
    device: Device = create_device(decoder.device.type)
    adapter = _adapter(decoder)
    optimizer = Optimizer(adapter.named_parameters(), Hyperparameters())
    memory = None
    if activations:
        assert can_capture(decoder)
        memory = Activations(
            decoder, TrainingPack(adapter, decoder.dtype, optimizer.gradient), device, 256, num_recomputed
        )
    dataset = _dataset(lengths)
    for _ in range(3):
        optimizer.gradient.zero_()
        _run_step(
            decoder, adapter, device, dataset, memory,
            num_recomputed=num_recomputed, discards=discards, takes_memory=takes_memory,
        )  # fmt: skip
        gradient = optimizer.gradient.cpu()
        with torch.no_grad():  # as an optimizer step would: what is captured has to read the weights anew
            for _, b in adapter.weights.values():
                b.mul_(-1.5)
        if memory is not None:
            memory.refresh()
    if memory is not None:
        memory.close()
    return gradient


def _run_step(
    decoder: Decoder,
    adapter: LoraAdapter,
    device: Device,
    dataset: Dataset,
    memory: Activations | None,
    *,
    num_recomputed: int,
    discards: int,
    takes_memory: bool,
) -> None:
    step = TrainingStep(
        decoder, adapter, dataset, list(range(len(dataset))), step_index=0, seed=0, max_tasklet_tokens=256,
        num_recomputed=num_recomputed, objective=CrossEntropy(), activations=memory,
    )  # fmt: skip
    generator = random.Random(3)
    while not step.done:
        if discards and generator.random() < 0.05:
            step.discard()  # the tasklet in flight goes on
            discards -= 1
            if takes_memory and memory is not None:
                _take(device, memory, generator.random(), drop=discards % 4 == 0)
        device.wait_for_room()
        device.run_tasklet(step.run_tasklet)
    device.synchronize()


def _take(device: Device, memory: Activations, share_left: float, *, drop: bool) -> None:
    """Take memory of activations away; ``drop``: all, and that of the graphs; else another arena leaves NaNs in it."""
    before = memory.mapped_bytes
    if drop:
        memory.drop()
        assert memory.mapped_bytes == 0
        return
    left = int(share_left * before)
    memory.give_back(left)
    assert memory.mapped_bytes <= left
    if before > memory.mapped_bytes:
        taker = device.create_arena(before - memory.mapped_bytes, memory.chunk_bytes)
        taker.map(range(taker.num_chunks))
        taker.tensor(torch.uint8).fill_(255)
        torch.cuda.current_stream().synchronize()  # not the tasklet in flight
        taker.unmap(taker.mapped, keep=True)
        taker.close()


@pytest.mark.parametrize("lengths", [[128] * 5, RAGGED], ids=["uniform", "ragged"])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_as_near_to_fp32_as_those_of_eager_layers(
    folders: dict[str, Path], model: str, lengths: list[int]
) -> None:
    exact = _gradient(_load(folders[model], "cpu", torch.float32), lengths, activations=False)
    decoder = _load(folders[model], "cuda", torch.bfloat16)
    eager, captured, *recomputed = (
        _gradient(decoder, lengths, activations=activations, num_recomputed=num_recomputed)
        for activations, num_recomputed in ((False, 0), (True, 0), (True, 1), (True, 2))
    )
    eager_error, error = (float((found - exact).norm() / exact.norm()) for found in (eager, captured))
    print(f"{model}: error {error:.5f}, of eager layers {eager_error:.5f}")
    assert error < 1.3 * eager_error + 1e-3
    for found in recomputed:
        assert float((found - captured).norm() / captured.norm()) < 1e-2


def test_a_capture_that_fails_leaves_the_stream_usable() -> None:
    pool = torch.cuda.graph_pool_handle()

    def fail() -> None:
        torch.zeros(8, device="cuda")
        raise ValueError("no")

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        with pytest.raises(ValueError, match="no"):
            capture_graph(fail, pool, warm_up=False)
        assert float((torch.ones(8, device="cuda") * 2).sum()) == 16.0
    torch.cuda.synchronize()


def test_a_capture_that_is_invalidated_costs_its_graph_alone() -> None:
    pool = torch.cuda.graph_pool_handle()
    numbers = torch.ones(1 << 24, device="cuda")  # 64 MiB

    def add() -> None:
        numbers.add_(numbers * 2)

    def synchronize() -> None:
        add()
        torch.cuda.synchronize()  # forbidden: no graph comes of this capture

    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        add()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        kept = capture_graph(add, pool, warm_up=False)
        for _ in range(2):
            with pytest.raises(RuntimeError):
                capture_graph(synchronize, pool, warm_up=False)
        assert not torch.cuda.is_current_stream_capturing()
        again = capture_graph(add, pool, warm_up=False)
        numbers.fill_(1.0)
        kept.replay()
        again.replay()
        assert float(numbers[0]) == 9.0
        # While torch believes in a capture, what another stream has used is not free after it.
        used = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
        used.record_stream(other)
        del used
        torch.cuda.synchronize()
        del kept, again
        for _ in range(2):  # also where the graph that does not come to be is the pool's only one
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() <= before, "a pool keeps memory for a graph that there is not"
            with pytest.raises(RuntimeError):
                capture_graph(synchronize, pool, warm_up=False)


@pytest.mark.parametrize("takes_memory", [False, True], ids=["discards", "memory-taken"])
@pytest.mark.parametrize("lengths", [[128] * 8, RAGGED * 2], ids=["uniform", "ragged"])
def test_discards_change_no_more_than_running_twice_does(
    folders: dict[str, Path], lengths: list[int], takes_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotenant.finetune.activations.CHUNK_BYTES", 2 << 20)  # several, also of so few tokens
    decoder = _load(folders["llama"], "cuda", torch.bfloat16)
    first, second = (_gradient(decoder, lengths, activations=True) for _ in range(2))
    disturbed = _gradient(decoder, lengths, activations=True, discards=20, takes_memory=takes_memory)
    noise, difference = (float((found - first).norm() / first.norm()) for found in (second, disturbed))
    print(f"run to run {noise:.2e}, with discards {difference:.2e}")
    assert difference <= 2 * noise + 1e-3


def test_memory_is_given_back_and_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = open_bench(ModelConfig("tiny", device="cuda"), Workload(512, 8192, 4096, 16, False))
    bench.steps(2, 1)
    activations = bench._activations
    assert activations is not None
    required = bench.require(20, bench._trainer.left_bytes // 2)
    assert required is not None
    assert required["unmapped_mib"]["p50"] > 0
    assert required["unmapped_ms"]["p50"] < required["latency_ms"]["p50"]
    run, kinds = bench._run_tasklet, list[TaskletKind]()  # not those that were timed: a busy host's are not

    def noted() -> TaskletKind:
        kinds.append(run())
        return kinds[-1]

    monkeypatch.setattr(bench, "_run_tasklet", noted)
    bench.steps(2, 1)
    bench.close()
    whole_steps = kinds[kinds.index(TaskletKind.OPTIMIZER) :]
    assert whole_steps.count(TaskletKind.FORWARD_MLP) == 2 * 2 * bench._decoder.spec.num_layers
    print(f"require: {required}")
