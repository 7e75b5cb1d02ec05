"""Memory of captured layers comes and goes layer by layer, at any moment, and runs out half-way through a tasklet."""

from __future__ import annotations

import itertools
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from cotenant.core.tasklet import TaskletKind, TaskletShape
from cotenant.device.cpu.arena import CpuArena
from cotenant.device.cpu.device import CpuDevice
from cotenant.finetune import activations, tasklets
from cotenant.finetune.captured import BACKWARD_PARTS, FORWARD_PARTS, CapturedLayers
from cotenant.models.decoder import Decoder
from cotenant.runtime.training import TrainingTenant
from finetune import support
from finetune.captured_layers import CHUNK_BYTES, DPO, DROPOUT, Lagging, Make, flat, run_to_end


def test_all_memory_can_be_given_back_at_any_moment(decoder: Decoder, captured: Make, tmp_path: Path) -> None:
    run_to_end(captured(decoder, tmp_path / "undisturbed", max_steps=8))
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
    run_to_end(captured(decoder, tmp_path / "undisturbed", max_steps=10))
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
    found, expected = flat(tmp_path / "disturbed"), flat(tmp_path / "undisturbed")
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
    run_to_end(captured(decoder, tmp_path / "undisturbed", max_steps=3, **changes))
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
        return flat(folder)

    undisturbed = run(tmp_path / "whole", 0)
    for num_parts in range(1, 6) if name == "map" else (1, 3, 8, 9, 10):
        disturbed = run(tmp_path / str(num_parts), num_parts)
        torch.testing.assert_close(disturbed, undisturbed, rtol=1e-3, atol=1e-5)
