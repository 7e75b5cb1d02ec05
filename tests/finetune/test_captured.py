"""Layers at fixed addresses, in halves: what GPUs capture runs eagerly here, and gives what eager layers give."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from cotenant.core.errors import CotenantError
from cotenant.core.job import StepMetrics
from cotenant.core.tasklet import TaskletKind, TaskletShape, runs_of
from cotenant.device import Device, create_device
from cotenant.device.cpu.arena import CpuArena
from cotenant.device.cpu.device import CpuDevice
from cotenant.finetune import activations, tasklets
from cotenant.finetune.captured import BACKWARD_PARTS, FORWARD_PARTS, CapturedLayers
from cotenant.finetune.footprint import state_bytes
from cotenant.finetune.job import TrainingJob
from cotenant.models.decoder import Decoder
from cotenant.runtime.training import TrainingTenant
from cotenant.wire.messages import JobMetrics
from finetune import support

DPO = {"method": "dpo", "batch_size": 3}
PATTERNS = {"rank_pattern": {"q_proj": 2, "down_proj": 3}, "alpha_pattern": {"up_proj": 3.0}, "use_rslora": True}
SOME_MODULES = {"target_modules": ("k_proj", "v_proj", "gate_proj")}
DROPOUT = {"lora_dropout": 0.3, "gradient_checkpointing": True}
DPO_DROPOUT = {**DPO, **PATTERNS, "lora_dropout": 0.3}

CHUNK_BYTES = 1 << 16
VALIDATION = support.random_examples(10, seed=5)

Make = Callable[..., TrainingJob]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes jobs whose layers are those that GPUs capture."""

    def make(
        decoder: Decoder,
        folder: Path,
        *,
        free_bytes: int | None = None,
        device: Device | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        validation: support.Examples | None = VALIDATION,
        **changes: object,
    ) -> TrainingJob:
        monkeypatch.setattr(activations, "can_capture", lambda *_: True)
        monkeypatch.setattr(activations, "CHUNK_BYTES", chunk_bytes)
        changes = changes if validation is None else {"eval_steps": 3, **changes}
        spec = support.make_spec(folder, validation=validation, **changes)
        return support.make_job(decoder, spec, device=device or create_device("cpu"), free_bytes=free_bytes)

    return make


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


def _run_to_end(job: TrainingJob) -> list[StepMetrics]:
    updates = support.run_to_end(job)
    job.close()
    return [step for update in updates if isinstance(update, JobMetrics) for step in update.steps]


def _measured(step: StepMetrics) -> list[float]:
    """All that was measured in a step and after it."""
    figures = [step.train_loss, step.grad_norm, step.train_mean_token_accuracy]
    for loss in (step.valid_loss, step.full_valid_loss, step.valid_mean_token_accuracy):
        figures += [] if loss is None else [loss]
    for preference in (step.preference, step.valid_preference, step.full_valid_preference):
        figures += [] if preference is None else dataclasses.astuple(preference)
    return figures


def _flat(folder: Path) -> torch.Tensor:
    tensors = safetensors.torch.load_file(folder / "adapter" / "adapter_model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


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
    steps = _run_to_end(job)
    spec = support.make_spec(tmp_path / "eager", validation=VALIDATION, eval_steps=3, max_steps=6, **changes)
    expected_steps = _run_to_end(support.make_job(any_decoder, spec))
    assert len(steps) == 6
    assert any(step.valid_loss is not None for step in steps)
    for found_step, expected_step in zip(steps, expected_steps, strict=True):
        assert _measured(found_step) == pytest.approx(_measured(expected_step), rel=1e-4, abs=1e-6)
    found, expected = _flat(tmp_path / "captured"), _flat(tmp_path / "eager")
    assert float((found - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.parametrize("changes", [{}, DPO, DROPOUT], ids=["plain", "dpo", "dropout"])
def test_discarding_at_random_points_changes_no_bit(
    decoder: Decoder, captured: Make, tmp_path: Path, changes: dict[str, object]
) -> None:
    _run_to_end(captured(decoder, tmp_path / "undisturbed", max_steps=12, **changes))
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


def test_all_memory_can_be_given_back_at_any_moment(decoder: Decoder, captured: Make, tmp_path: Path) -> None:
    _run_to_end(captured(decoder, tmp_path / "undisturbed", max_steps=8))
    job = captured(decoder, tmp_path / "disturbed", max_steps=8)
    generator = random.Random(2)
    assert job.mapped_bytes == 0
    while not job.done:
        if not job.upcoming():
            job.wait_for_writes()
        else:
            support.run(job, generator.randint(1, sum(cycle.num_tasklets for cycle in job.upcoming())))
            if job.upcoming() and job.mapped_bytes and generator.random() < 0.5:
                job.discard_all()
                assert job.mapped_bytes == 0
        job.take_updates()
    job.close()
    assert job.mapped_bytes == 0
    assert support.adapter_bytes(tmp_path / "disturbed") == support.adapter_bytes(tmp_path / "undisturbed")


def test_memory_goes_and_comes_at_random_moments(decoder: Decoder, captured: Make, tmp_path: Path) -> None:
    """What is given away is unmapped at once, and every sample is trained on once."""
    _run_to_end(captured(decoder, tmp_path / "undisturbed", max_steps=10))
    job = captured(decoder, tmp_path / "disturbed", max_steps=10)
    generator, lent, num_waits = random.Random(3), 0, 0
    total = job.require(1 << 60)
    assert not job.runnable
    job.release(total)
    while not job.done:
        if job.upcoming():
            support.run(job, min(generator.randint(1, 30), sum(cycle.num_tasklets for cycle in job.upcoming())))
        elif lent == 0:
            job.wait_for_writes()
        if lent == 0 and not job.finished_path and generator.random() < 0.4 and job.runnable:
            lent = job.require(generator.choice((total, generator.randint(1, total))))
            assert lent % CHUNK_BYTES == 0
            assert job.mapped_bytes <= job.left_bytes
            num_waits += not job.runnable
        elif lent:
            job.release(lent)
            lent = 0
        job.take_updates()
    job.close()
    assert num_waits > 2, "there was always room for the longest example"
    found, expected = _flat(tmp_path / "disturbed"), _flat(tmp_path / "undisturbed")
    assert float((found - expected).norm() / expected.norm()) < 1e-4


class Poison:
    """Whoever touches more of the arena than was noted for its tasklet reads rubbish, or what it writes is lost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._hidden: tuple[torch.Tensor, torch.Tensor] | None = None
        self.storages: list[torch.Tensor] = []
        self.reaches: set[int] = set()
        create, note = activations.Activations.__init__, activations._Reaches.note

        def remember_storage(arena: activations.Activations, *args: Any, **options: Any) -> None:
            create(arena, *args, **options)
            self.storages.append(arena._storage)

        def note_and_hide(reaches: activations._Reaches, num_bytes: int) -> None:
            note(reaches, num_bytes)
            self.reaches.add(num_bytes)
            self.restore()
            beyond = self.storages[-1][num_bytes:]
            self._hidden = beyond, beyond.clone()
            beyond.fill_(255)  # not a number, in every floating-point type

        monkeypatch.setattr(activations.Activations, "__init__", remember_storage)
        monkeypatch.setattr(activations._Reaches, "note", note_and_hide)

    def restore(self) -> None:
        if self._hidden is not None:
            beyond, values = self._hidden
            assert (beyond == 255).all(), "a tasklet has written beyond its reach"
            beyond.copy_(values)
            self._hidden = None


@pytest.mark.parametrize(
    ("changes", "num_recomputed"),
    [({}, 0), ({}, 1), (DPO, 0), (DPO, 1), (DROPOUT, 2)],
    ids=["plain", "plain-1", "dpo", "dpo-1", "dropout"],
)
def test_tasklets_touch_no_more_than_their_layers_memory(
    decoder: Decoder,
    captured: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object],
    num_recomputed: int,
) -> None:
    _run_to_end(captured(decoder, tmp_path / "undisturbed", max_steps=3, **changes))
    poison = Poison(monkeypatch)
    job = captured(decoder, tmp_path / "poisoned", max_steps=3, **changes)
    while job.num_recomputed < num_recomputed:
        job.require(CHUNK_BYTES)
    assert job.num_recomputed == num_recomputed
    while not job.done:
        if job.upcoming():
            support.run(job, 1)
            poison.restore()
        else:
            job.wait_for_writes()
        job.take_updates()
    job.close()
    assert len(poison.reaches) > 2
    assert support.adapter_bytes(tmp_path / "poisoned") == support.adapter_bytes(tmp_path / "undisturbed")


class Lagging(CpuDevice):
    """The last ``lag`` tasklets count as in flight, until somebody waits for them."""

    def __init__(self, lag: int) -> None:
        super().__init__()
        self.lag, self.num_waits, self._num_awaited = lag, 0, 0

    def num_ended(self) -> int:
        return max(self._num_awaited, self.num_launched - self.lag)

    def wait_for_tasklets(self) -> None:
        self.num_waits += 1
        self._num_awaited = self.num_launched


def test_memory_of_other_layers_is_given_back_while_a_tasklet_runs(
    decoder: Decoder, captured: Make, tmp_path: Path
) -> None:
    """Its end is waited for only where it is one of the last layer's, whose memory lies on top. All of it is there: the
    micro-batch ran before."""
    chunk_bytes = 1 << 14  # less than a layer's
    num_forward = decoder.spec.num_layers * len(FORWARD_PARTS)
    on_top = {num_forward - 2, num_forward - 1, num_forward + 1, num_forward + 2, num_forward + 3}
    order = [*FORWARD_PARTS * decoder.spec.num_layers, TaskletKind.LOSS, *BACKWARD_PARTS * decoder.spec.num_layers]
    for num_run in range(2, len(order)):
        device = Lagging(2)
        job = captured(decoder, tmp_path / str(num_run), device=device, chunk_bytes=chunk_bytes, validation=None)
        for _ in range(num_forward):
            device.run_tasklet(job.run_tasklet)
        job.discard_step()
        for kind in order[:num_run]:
            assert job.next_shape.kind is kind
            device.run_tasklet(job.run_tasklet)
        job.require(job.left_bytes - job.mapped_bytes + chunk_bytes)
        assert (device.num_waits > 0) == bool(on_top & {num_run - 1, num_run - 2}), order[:num_run]
        job.close()


def test_a_layers_memory_comes_when_its_forward_runs(decoder: Decoder, captured: Make, tmp_path: Path) -> None:
    """To map all of it at once takes longer than a step. While it is cleared, whoever takes it waits."""
    device, chunk_bytes = Lagging(1), 1 << 14
    job = captured(decoder, tmp_path, device=device, chunk_bytes=chunk_bytes, validation=None)
    mapped = []
    for _ in range(2 * len(FORWARD_PARTS) * decoder.spec.num_layers):
        device.run_tasklet(job.run_tasklet)
        mapped.append(job.mapped_bytes)
    num_forward = len(FORWARD_PARTS) * decoder.spec.num_layers
    firsts = mapped[: num_forward : len(FORWARD_PARTS)]
    assert all(before < after for before, after in itertools.pairwise(firsts))
    assert set(mapped[num_forward:]) == {firsts[-1]}, "the backward pass needs no more"
    assert firsts[-1] <= job.left_bytes
    again = captured(decoder, tmp_path / "again", device=device, chunk_bytes=chunk_bytes, validation=None)
    device.run_tasklet(again.run_tasklet)
    device.num_waits = 0
    again.require(again.left_bytes - again.mapped_bytes + chunk_bytes)
    assert device.num_waits == 1


def test_memory_that_is_still_being_cleared_is_waited_for(
    decoder: Decoder, captured: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the micro-batch that it was for did not come about."""

    def short_of_memory(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    device = Lagging(2)
    job = captured(decoder, tmp_path, device=device, chunk_bytes=1 << 14, validation=None)
    monkeypatch.setattr(CapturedLayers, "load", short_of_memory)
    shape = job.next_shape

    def launch() -> TaskletShape:
        with suppress(torch.OutOfMemoryError):
            job.run_tasklet()
        return shape

    device.run_tasklet(launch)
    assert job.mapped_bytes > 0
    job.require(job.left_bytes - job.mapped_bytes + (1 << 14))
    assert device.num_waits == 1


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize(("module", "name"), [(tasklets, "layer_backward"), (CapturedLayers, "run"), (CpuArena, "map")])
def test_a_tasklet_that_runs_out_of_memory_half_done_changes_nothing(
    decoder: Decoder, captured: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str,
    is_kept: bool,
) -> None:  # fmt: skip
    """Whoever gives memory: the micro-batch, or arenas that have kept some (``is_kept``)."""
    run_part = getattr(module, name)

    def run(folder: Path, num_parts: int) -> torch.Tensor:
        """Out of memory at the end of so many parts of layers, within a tasklet."""
        device, kept, left = CpuDevice(), [True] if is_kept else [], num_parts

        def short_at_last(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            result = None if left == 0 and name == "map" else run_part(*args, **kwargs)
            if left == 0:
                raise torch.OutOfMemoryError("no memory")
            return result

        monkeypatch.setattr(module, name, short_at_last)
        monkeypatch.setattr(device, "release_kept_memory", lambda most_bytes=None: bool(kept and kept.pop()))
        if module is tasklets:
            job = support.make_job(decoder, support.make_spec(folder), device=device)
        else:  # some chunks for each layer
            job = captured(decoder, folder, device=device, chunk_bytes=1 << 14)
        tenant = TrainingTenant(device, decoder, None, support.TASKLET_TOKENS, lambda update: None)
        tenant._job, tenant._job_id = job, "ftjob-1"
        while tenant.job_id is not None:
            if tenant.runnable:
                device.run_tasklet(tenant.run_tasklet)
            else:
                job.wait_for_writes()
            tenant.publish()
        assert left <= 0
        return _flat(folder)

    undisturbed = run(tmp_path / "whole", 0)
    for num_parts in range(1, 6) if name == "map" else (1, 3, 8, 9, 10):
        disturbed = run(tmp_path / str(num_parts), num_parts)
        torch.testing.assert_close(disturbed, undisturbed, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("limit", [{"_MAX_FRAMES": 2}, {"_MAX_GRAPHS": 250}], ids=["frames", "graphs"])
def test_frames_beyond_the_limit_are_let_go_of(
    decoder: Decoder, captured: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: dict[str, int]
) -> None:
    """As if each had 100 graphs."""
    _run_to_end(captured(decoder, tmp_path / "undisturbed", max_steps=6))
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
    _run_to_end(captured(decoder, tmp_path / "whole", max_steps=9))
    job = captured(decoder, tmp_path / "parts", max_steps=9)
    while job.step < 4:
        support.run_step(job)
    support.run(job, 5)
    job.checkpoint()
    job.close()
    _run_to_end(captured(decoder, tmp_path / "parts", max_steps=9))
    assert support.adapter_bytes(tmp_path / "parts") == support.adapter_bytes(tmp_path / "whole")


def test_a_job_is_refused_or_trains(decoder: Decoder, captured: Make, tmp_path: Path) -> None:
    """Whatever memory there is, no job is accepted that then waits for ever."""
    outcomes, codes = [], set()
    for kib in range(200, 1400, 100):
        try:
            job = captured(decoder, tmp_path / str(kib), free_bytes=kib << 10, max_steps=1)
        except CotenantError as error:
            codes.add(error.code)
            outcomes.append(False)
            continue
        assert job.runnable
        _run_to_end(job)
        outcomes.append(True)
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}
    assert codes == {"insufficient_memory"}


@pytest.mark.parametrize("is_captured", [False, True])
def test_what_is_said_to_be_lacking_is_enough_and_no_more(
    decoder: Decoder, captured: Make, tmp_path: Path, is_captured: bool
) -> None:
    """With all that the job needs counted, and what is free as it was said to be."""

    def make(name: str, free_bytes: int, validation: support.Examples) -> TrainingJob:
        if is_captured:
            return captured(decoder, tmp_path / name, free_bytes=free_bytes, validation=validation, max_length=250)
        spec = support.make_spec(tmp_path / name, validation=validation, eval_steps=3, max_length=250)
        return support.make_job(decoder, spec, free_bytes=free_bytes)

    undisturbed = make("undisturbed", 1 << 40, VALIDATION)
    state = state_bytes(sum(matrix.numel() for matrix in undisturbed.adapter.parameters()))
    undisturbed.close()
    long = [([5] * 250, [0.0] + [1.0] * 249)]
    for validation, few in itertools.product((VALIDATION, long), (state - 1000, state + 1000)):
        name = f"{len(validation)}-{few}"
        with pytest.raises(CotenantError) as refused:
            make(name, few, validation)
        numbers = re.findall(r"(\d+) (?:bytes|for it|\(\d+ MiB\) are)", refused.value.message)
        needed, free, lacking = map(int, numbers)
        assert (free, needed - free) == (few, lacking)
        if few < state:
            continue  # a bound
        make(f"{name}-enough", few + lacking, validation).close()
        with pytest.raises(CotenantError) as refused:
            make(f"{name}-less", few + lacking - 1, validation)
        assert "so 1 (0 MiB) are lacking" in refused.value.message


def test_a_long_validation_example_has_room_as_well(decoder: Decoder, captured: Make, tmp_path: Path) -> None:
    """In one piece; what fits without it does not."""
    changes = {"max_length": 250, "max_steps": 1}
    long = [([5] * 250, [0.0] + [1.0] * 249)]
    for kib in range(200, 1400, 100):
        with suppress(CotenantError):
            _run_to_end(captured(decoder, tmp_path / str(kib), free_bytes=kib << 10, **changes))
            break
    for more_kib, is_refused in ((0, True), (200, True), (1000, False)):
        folder, free_bytes = tmp_path / f"long-{more_kib}", (kib + more_kib) << 10
        if is_refused:
            with pytest.raises(CotenantError, match=r"\(250 in the validation file\)"):
                captured(decoder, folder, free_bytes=free_bytes, validation=long, **changes)
        else:
            _run_to_end(captured(decoder, folder, free_bytes=free_bytes, validation=long, **changes))
