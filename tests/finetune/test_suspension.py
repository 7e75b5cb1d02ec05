"""Suspending, discarding and fusing change nothing that a job produces."""

from __future__ import annotations

import gc
import random
import weakref
from pathlib import Path

import pytest
import safetensors.torch
import torch

from cotenant.core.job import JobSpec
from cotenant.core.tasklet import TaskletKind, runs_of
from cotenant.finetune.captured import BACKWARD_PARTS, FORWARD_PARTS, RECOMPUTE_PARTS
from cotenant.finetune.job import TrainingJob
from cotenant.models.batch import AdapterSpan, Batch, TrainingSegment
from cotenant.models.decoder import Decoder
from cotenant.models.tape import LayerTape
from finetune import support

WITH_DROPOUT = {"lora_dropout": 0.1}
DPO = {"method": "dpo", "batch_size": 3, "lora_dropout": 0.1}
RECOMPUTING = {"gradient_checkpointing": True}


def _undisturbed(decoder: Decoder, folder: Path, **changes: object) -> bytes:
    job = support.make_job(decoder, _spec(folder, **changes))
    support.run_to_end(job)
    job.close()
    return support.adapter_bytes(folder)


def _spec(folder: Path, **changes: object) -> JobSpec:
    return support.make_spec(folder, validation=support.random_examples(10, seed=5), eval_steps=3, **changes)


def _num_left(job: TrainingJob) -> int:
    return sum(cycle.num_tasklets for cycle in job.upcoming())


@pytest.mark.parametrize("changes", [{}, WITH_DROPOUT, DPO, RECOMPUTING], ids=["plain", "dropout", "dpo", "recompute"])
def test_discarding_at_random_points_changes_no_bit(
    decoder: Decoder, tmp_path: Path, changes: dict[str, object]
) -> None:
    expected = _undisturbed(decoder, tmp_path / "undisturbed", max_steps=40, **changes)
    job = support.make_job(decoder, _spec(tmp_path / "discarded", max_steps=40, **changes))
    generator = random.Random(1)
    discarded_kinds = set()
    num_discards = 0
    while not job.done:
        if not job.upcoming():
            job.wait_for_writes()
        elif num_discards < 200 and generator.random() < 0.9:
            support.run(job, generator.randint(0, _num_left(job) - 1))
            support.wait_for_copy(job)
            discarded_kinds.add(job.next_shape.kind)
            job.discard_step()
            assert not job.in_flight
            num_discards += 1
        else:
            support.run_step(job)
        job.take_updates()
    job.close()
    assert num_discards == 200
    parts = {*FORWARD_PARTS, *RECOMPUTE_PARTS, *BACKWARD_PARTS}
    recomputes = "gradient_checkpointing" in changes
    assert discarded_kinds == set(TaskletKind) - parts - (set() if recomputes else {TaskletKind.RECOMPUTE})
    assert support.adapter_bytes(tmp_path / "discarded") == expected
    assert _metrics(tmp_path / "discarded") == _metrics(tmp_path / "undisturbed")


def _metrics(folder: Path) -> str:
    return (folder / "metrics.jsonl").read_text()


def test_discard_restores_everything_a_step_touches(decoder: Decoder, tmp_path: Path) -> None:
    job = support.make_job(decoder, _spec(tmp_path))
    support.run_step(job)
    support.run_step(job)
    before = [parameter.clone() for parameter in job.adapter.parameters()]
    upcoming = job.upcoming()
    kinds = [run.shape.kind for run in runs_of(upcoming) for _ in range(run.count)]
    support.run(job, kinds.index(TaskletKind.BACKWARD) + 2)
    assert job.in_flight
    job.discard_step()
    assert job.upcoming() == upcoming
    assert not any(gradient.any() for gradient in _gradients(job))
    assert all(torch.equal(now, then) for now, then in zip(job.adapter.parameters(), before, strict=True))
    job.close()


@pytest.mark.parametrize("changes", [WITH_DROPOUT, DPO], ids=["supervised", "dpo"])
def test_other_work_between_tasklets_changes_no_bit(
    decoder: Decoder, tmp_path: Path, changes: dict[str, object]
) -> None:
    """Suspension: the same decoder serves other batches, without gradients, between any two tasklets."""
    expected = _undisturbed(decoder, tmp_path / "undisturbed", **changes)
    job = support.make_job(decoder, _spec(tmp_path / "suspended", **changes))
    other = _other_batch()
    generator = random.Random(2)
    while not job.done:
        if job.upcoming():
            job.run_tasklet()
        else:
            job.wait_for_writes()
        if generator.random() < 0.3:
            with torch.inference_mode():
                decoder.layer(0, decoder.embed(other.token_ids), other)
        job.take_updates()
    job.close()
    assert support.adapter_bytes(tmp_path / "suspended") == expected


def _other_batch() -> Batch:
    return Batch(torch.arange(3, 10), torch.arange(7), (TrainingSegment((7,)),))


def _join(first: Batch, second: Batch) -> Batch:
    shift = first.num_tokens
    spans = tuple(AdapterSpan(span.start + shift, span.stop + shift, span.adapter) for span in second.spans)
    return Batch(
        torch.cat([first.token_ids, second.token_ids]),
        torch.cat([first.positions, second.positions]),
        first.segments + second.segments,
        first.spans + spans,
    )


@pytest.mark.parametrize("changes", [{}, DPO], ids=["supervised", "dpo"])
def test_fused_forward_gives_the_same_adapter(decoder: Decoder, tmp_path: Path, changes: dict[str, object]) -> None:
    """Unrelated rows before the training rows, in a random half of the forward tasklets, with discards in between."""
    expected = _undisturbed(decoder, tmp_path / "undisturbed", max_steps=40, **changes)
    job = support.make_job(decoder, _spec(tmp_path / "fused", max_steps=40, **changes))
    generator = random.Random(3)
    num_fused = 0
    while not job.done:
        layer = job.fusable_layer
        if layer is not None and generator.random() < 0.5:
            _run_fused(job, decoder, layer, call_off=generator.random() < 0.02)
            num_fused += 1
        elif job.upcoming():
            job.run_tasklet()
        else:
            job.wait_for_writes()
        job.take_updates()
    job.close()
    assert num_fused > 100
    trained, wanted = (_flat(folder) for folder in (tmp_path / "fused", tmp_path / "undisturbed"))
    assert len(expected) == len(support.adapter_bytes(tmp_path / "fused"))
    assert float((trained - wanted).norm() / wanted.norm()) < 1e-5


def _run_fused(job: TrainingJob, decoder: Decoder, layer: int, *, call_off: bool) -> None:
    fused = job.begin_fused()
    assert fused.layer == layer
    num_tokens = fused.segment.num_tokens
    training = Batch(
        torch.zeros(num_tokens, dtype=torch.int64),
        fused.positions,
        (fused.segment,),
        (AdapterSpan(0, num_tokens, fused.adapter),),
    )
    other = _other_batch()
    hidden = torch.cat([decoder.embed(other.token_ids), fused.hidden])
    if call_off:
        job.discard_step()
        return
    tape = LayerTape(slice(other.num_tokens, other.num_tokens + num_tokens))
    output = decoder.layer(layer, hidden, _join(other, training), tape=tape)
    shape = job.end_fused(output[tape.rows], tape)
    assert shape.kind is TaskletKind.FORWARD
    assert shape.num_tokens == num_tokens


def _flat(folder: Path) -> torch.Tensor:
    tensors = safetensors.torch.load_file(folder / "adapter" / "adapter_model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def test_evaluation_cannot_be_fused(decoder: Decoder, tmp_path: Path) -> None:
    job = support.make_job(decoder, _spec(tmp_path))
    while job.next_shape.kind is not TaskletKind.EVAL_FORWARD:
        layer = job.fusable_layer
        assert (layer is not None) == (job.next_shape.kind is TaskletKind.FORWARD)
        job.run_tasklet()
    assert job.fusable_layer is None
    job.close()


@pytest.mark.parametrize("changes", [{}, DPO], ids=["supervised", "dpo"])
def test_upcoming_tells_exactly_what_runs(decoder: Decoder, tmp_path: Path, changes: dict[str, object]) -> None:
    job = support.make_job(decoder, _spec(tmp_path, **changes))
    for _ in range(4):
        announced = [run.shape for run in runs_of(job.upcoming()) for _ in range(run.count)]
        step = job.step
        assert announced.count(announced[-1]) >= 1
        for position, shape in enumerate(announced):
            support.wait_for_copy(job)
            left = [run.shape for run in runs_of(job.upcoming()) for _ in range(run.count)]
            assert left == announced[position:]
            assert job.run_tasklet() == shape
        assert job.step == step + 1
    job.close()


@pytest.mark.parametrize("changes", [WITH_DROPOUT, DPO], ids=["supervised", "dpo"])
def test_recomputation_changes_no_bit(decoder: Decoder, tmp_path: Path, changes: dict[str, object]) -> None:
    expected = _undisturbed(decoder, tmp_path / "kept", **changes)
    assert _undisturbed(decoder, tmp_path / "again", gradient_checkpointing=True, **changes) == expected


def test_a_discard_keeps_the_micro_batches_that_are_done(decoder: Decoder, tmp_path: Path) -> None:
    job = support.make_job(decoder, _spec(tmp_path, batch_size=12))
    support.run_step(job)
    upcoming = job.upcoming()
    per_micro_batch = sum(cycle.num_tasklets for cycle in upcoming[:3])
    assert [run.shape.kind for run in runs_of(upcoming[:6:3])] == [TaskletKind.FORWARD, TaskletKind.FORWARD]
    support.run(job, per_micro_batch + 1)
    kept = _gradients(job)
    assert any(gradient.any() for gradient in kept)
    support.run(job, upcoming[3].num_tasklets + 1)  # into the second micro-batch's backward
    job.discard_step()
    assert not job.in_flight
    assert job.upcoming() == upcoming[3:]
    assert all(map(torch.equal, _gradients(job), kept))
    job.close()


def _gradients(job: TrainingJob) -> list[torch.Tensor]:
    """Copies of those that the step has gathered so far, at each matrix."""
    gradients = [parameter.grad for parameter in job.adapter.parameters()]
    found = [gradient.clone() for gradient in gradients if gradient is not None]
    assert len(found) == len(gradients)
    return found


@pytest.mark.parametrize("changes", [{}, DPO], ids=["supervised", "dpo"])
def test_a_closed_job_lets_go_of_its_adapter_at_once(
    decoder: Decoder, tmp_path: Path, changes: dict[str, object]
) -> None:
    """Not when the garbage collector comes by: in the middle of a step, and of an evaluation."""
    for kind in (TaskletKind.BACKWARD, TaskletKind.EVAL_LOSS):
        job = support.make_job(decoder, _spec(tmp_path / kind, **changes))
        while job.next_shape.kind is not kind:
            job.run_tasklet()
        job.run_tasklet()
        adapter = weakref.ref(job.adapter)
        gc.disable()
        try:
            job.close()
            del job
            assert adapter() is None
        finally:
            gc.enable()
