"""Memory of activations is given away and taken back at any moment, and training goes on with what is left."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.tasklet import TaskletKind, runs_of
from cotenant.finetune.budget import ActivationBudget, Choice, choices, ladder
from cotenant.finetune.footprint import activation_bytes, passing_bytes
from cotenant.finetune.job import TrainingJob
from cotenant.models.decoder import Decoder
from cotenant.models.spec import ModelSpec
from cotenant.wire.messages import JobMetrics
from finetune import support

SPEC = ModelSpec("llama", 4, 64, 128, 4, 2, 16, 100, 4096)
WITH_DROPOUT = {"lora_dropout": 0.1}
DPO = {"method": "dpo", "batch_size": 3, "lora_dropout": 0.1}


@given(st.integers(1, 9000), st.integers(1, 9000))
def test_a_ladder_is_short_and_holds_what_must_fit(most: int, longest: int) -> None:
    sizes = ladder(most, longest)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == longest
    assert sizes[-1] == max(most, longest)
    assert len(sizes) <= 7


@given(
    st.integers(1, 5000),
    st.integers(1, 3000),
    st.lists(st.tuples(st.booleans(), st.integers(0, 1 << 28)), max_size=30),
)
def test_what_is_given_away_is_not_used(most: int, longest: int, calls: list[tuple[bool, int]]) -> None:
    ways = _choices(ladder(most, longest))
    total, kept_back = max(way.num_bytes for way in ways), passing_bytes(SPEC, max(most, longest), torch.float32)
    budget = ActivationBudget(ways, kept_back_bytes=kept_back)
    lent = 0
    assert budget.max_tokens == max(most, longest)
    for takes, num_bytes in calls:
        if takes:
            given_bytes = budget.require(num_bytes)
            assert given_bytes == min(num_bytes, total - kept_back - lent)
            lent += given_bytes
        elif num_bytes <= lent:
            budget.release(num_bytes)
            lent -= num_bytes
        else:
            with pytest.raises(ValueError, match="only"):
                budget.release(num_bytes)
        assert budget.lent_bytes == lent
        tokens = budget.max_tokens
        if tokens:
            assert tokens >= longest
            assert activation_bytes(SPEC, tokens, torch.float32, budget.num_recomputed) <= total - lent
        else:
            assert activation_bytes(SPEC, longest, torch.float32, SPEC.num_layers - 1) > total - lent


def _choices(
    sizes: tuple[int, ...], efficiency: Callable[[int], float] | None = None, *, recompute_all: bool = False
) -> tuple[Choice, ...]:
    def needed(size: int, num_recomputed: int) -> int:
        return activation_bytes(SPEC, size, torch.float32, num_recomputed)

    return choices(sizes, SPEC.num_layers, needed, 0.4, efficiency, recompute_all=recompute_all)


@given(st.integers(500, 5000), st.floats(0.0, 1.0))
def test_of_what_fits_the_fastest_is_chosen(most: int, share: float) -> None:
    """Each layer that is recomputed costs a tenth here, and half as many tokens a fifth."""
    sizes = ladder(most, 100)
    ways = _choices(sizes, lambda size: 0.8 ** math.log2(most / size))
    bytes_left = int(share * max(way.num_bytes for way in ways))
    budget = ActivationBudget(ways, available_bytes=bytes_left)
    times = {
        way: (1 + 0.1 * way.num_recomputed) * 1.25 ** math.log2(most / way.max_tokens)
        for way in ways
        if way.num_bytes <= bytes_left
    }
    if not times:
        assert budget.max_tokens == 0
        return
    chosen = {(way.max_tokens, way.num_recomputed): time for way, time in times.items()}
    assert chosen[budget.max_tokens, budget.num_recomputed] == pytest.approx(min(times.values()))


@given(st.integers(500, 5000), st.floats(0.0, 1.0))
def test_where_all_sizes_are_alike_layers_are_recomputed_only_where_they_must_be(most: int, share: float) -> None:
    ways = _choices(ladder(most, 100))
    assert {way.num_recomputed for way in ways} == set(range(SPEC.num_layers))
    budget = ActivationBudget(ways, available_bytes=int(share * max(way.num_bytes for way in ways)))
    fitting = [(-way.num_recomputed, way.max_tokens) for way in ways if way.num_bytes <= budget.left_bytes]
    expected = max(fitting, default=(0, 0))
    assert (-budget.num_recomputed, budget.max_tokens) == expected
    assert {way.num_recomputed for way in _choices((100, 200), recompute_all=True)} == {SPEC.num_layers - 1}


def _bytes_for(decoder: Decoder, num_tokens: int) -> int:
    """What must go for micro-batches of ``num_tokens`` to be the largest that fit."""
    sizes = (support.TASKLET_TOKENS, num_tokens)
    most, wanted = (activation_bytes(decoder.spec, size, decoder.dtype) for size in sizes)
    return most - (wanted if num_tokens else 0)


def _sizes(job: TrainingJob) -> list[int]:
    return [run.shape.num_tokens for run in runs_of(job.upcoming()) if run.shape.kind is TaskletKind.FORWARD]


@pytest.mark.parametrize("changes", [{}, WITH_DROPOUT, DPO], ids=["supervised", "dropout", "dpo"])
def test_training_goes_on_in_less_memory_and_learns_the_same(
    decoder: Decoder, tmp_path: Path, changes: dict[str, object]
) -> None:
    """Memory goes and comes at random moments of forward, loss and backward; every sample is trained on once."""
    examples = support.random_examples(40, shortest=5, longest=14)
    adapters, figures = [], []
    for name in ("undisturbed", "disturbed"):
        spec = support.make_spec(tmp_path / name, examples=examples, max_steps=20, **changes)
        job = support.make_job(decoder, spec)
        generator, lent, num_requires = random.Random(4), 0, 0
        while not job.done:
            if job.upcoming():
                support.run(job, min(generator.randint(1, 9), sum(cycle.num_tasklets for cycle in job.upcoming())))
            elif lent == 0:
                job.wait_for_writes()
            if name == "disturbed" and not job.finished_path and generator.random() < 0.4 and job.upcoming():
                given_bytes = job.require(_bytes_for(decoder, generator.choice((28, 40))))
                lent, num_requires = lent + given_bytes, num_requires + 1
                assert all(size <= 40 for size in _sizes(job))
            elif lent:
                job.release(lent)
                lent = 0
            job.take_updates()
        job.close()
        assert (num_requires > 20) == (name == "disturbed")
        adapters.append(_flat(tmp_path / name))
        figures.append(job.trained_tokens)
    assert figures[0] == figures[1]
    assert float((adapters[1] - adapters[0]).norm() / adapters[0].norm()) < 1e-4


def test_how_a_step_is_split_changes_no_dropout_mask(decoder: Decoder, tmp_path: Path) -> None:
    examples = support.random_examples(16, shortest=5, longest=14)
    steps = []
    for num_tokens in (48, 28, 14):
        spec = support.make_spec(tmp_path / str(num_tokens), examples, batch_size=16, max_steps=1, lora_dropout=0.1)
        job = support.make_job(decoder, spec)
        job.require(_bytes_for(decoder, num_tokens))
        num_micro_batches = len(_sizes(job))
        (step,) = (step for each in support.run_to_end(job) if isinstance(each, JobMetrics) for step in each.steps)
        job.close()
        steps.append((num_micro_batches, step.train_loss, step.grad_norm))
    assert len({num for num, *_ in steps}) == 3
    for _, *figures in steps[1:]:
        assert figures == pytest.approx(steps[0][1:], rel=1e-5)


def test_without_room_for_the_longest_example_training_waits(decoder: Decoder, tmp_path: Path) -> None:
    job = support.make_job(decoder, support.make_spec(tmp_path))
    support.run_step(job)
    upcoming = job.upcoming()
    support.run(job, 3)
    everything = job.require(1 << 40)
    assert everything == _bytes_for(decoder, 0)
    assert job.fusable_layer is None
    assert not job.in_flight
    assert job.upcoming() == ()
    assert not job.done
    job.release(everything)
    assert job.upcoming() == upcoming
    support.run_to_end(job)
    job.close()


def test_a_micro_batch_that_fits_is_kept(decoder: Decoder, tmp_path: Path) -> None:
    examples = [([7] * 12, [0.0] * 4 + [1.0] * 8)] * 12
    job = support.make_job(decoder, support.make_spec(tmp_path, examples=examples, batch_size=5, max_steps=2))
    assert _sizes(job) == [48, 12]
    support.run(job, 2)
    job.require(_bytes_for(decoder, 24))
    assert not job.in_flight
    assert _sizes(job) == [24, 24, 12]
    support.run(job, 3)
    upcoming = job.upcoming()
    assert job.require(1) == 1  # one byte less: 24 tokens do not fit any more, 12 do
    assert _sizes(job) == [12, 12, 12, 12, 12]
    job.release(1)
    assert job.upcoming() != upcoming  # until the next step
    while job.step == 0:
        job.run_tasklet()
    assert _sizes(job) == [24, 24, 12]
    support.run(job, 2)
    upcoming = job.upcoming()
    job.require(0)
    assert job.in_flight
    assert job.upcoming() == upcoming
    job.close()


def _flat(folder: Path) -> torch.Tensor:
    tensors = safetensors.torch.load_file(folder / "adapter" / "adapter_model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def test_layers_are_computed_again_before_training_has_to_wait(decoder: Decoder, tmp_path: Path) -> None:
    examples = [([7] * 40, [0.0] * 4 + [1.0] * 36)] * 8
    job = support.make_job(decoder, support.make_spec(tmp_path, examples=examples, batch_size=4, max_steps=2))
    total, given_bytes = _bytes_for(decoder, 0), 0
    for num_recomputed in range(1, decoder.spec.num_layers):
        support.run(job, 2)
        least = activation_bytes(decoder.spec, 40, decoder.dtype, num_recomputed)
        given_bytes += job.require(total - given_bytes - least)
        assert not job.in_flight, "what it keeps has no room"
        assert _sizes(job) == [40, 40, 40, 40]
        assert _num_recomputed(job) == 4 * num_recomputed
    support.run_step(job)
    assert job.step == 1
    job.require(1)
    assert job.upcoming() == ()
    job.release(given_bytes + 1)
    assert _sizes(job) == [40, 40, 40, 40]
    assert _num_recomputed(job) == 0
    support.run_to_end(job)
    job.close()


def test_recomputing_some_layers_changes_no_bit(decoder: Decoder, tmp_path: Path) -> None:
    """Whose number changes at any moment, also while a micro-batch is in flight."""
    examples = [([7 + i] * 40, [0.0] * 4 + [1.0] * 36) for i in range(12)]
    adapters = []
    for name in ("undisturbed", "disturbed"):
        job = support.make_job(
            decoder, support.make_spec(tmp_path / name, examples=examples, batch_size=4, max_steps=9, **WITH_DROPOUT)
        )
        generator, total, lent, numbers = random.Random(5), _bytes_for(decoder, 0), 0, set[int]()
        while not job.done:
            if not job.upcoming():
                job.wait_for_writes()
            else:
                support.run(job, generator.randint(1, 7) if _num_left(job) > 7 else 1)
                if name == "disturbed" and job.upcoming():
                    job.release(lent)
                    num_recomputed = generator.randint(0, decoder.spec.num_layers - 1)
                    lent = job.require(total - activation_bytes(decoder.spec, 40, decoder.dtype, num_recomputed))
                    numbers.add(_num_recomputed(job) % 4)
            job.take_updates()
        job.close()
        assert (len(numbers) > 2) == (name == "disturbed")
        adapters.append(support.adapter_bytes(tmp_path / name))
    assert adapters[0] == adapters[1]


def _num_left(job: TrainingJob) -> int:
    return sum(cycle.num_tasklets for cycle in job.upcoming())


def _num_recomputed(job: TrainingJob) -> int:
    """Layers, over all micro-batches that are upcoming."""
    return sum(run.count for run in runs_of(job.upcoming()) if run.shape.kind is TaskletKind.RECOMPUTE)


@pytest.mark.parametrize("method", ["supervised", "dpo"])
def test_a_long_example_makes_no_other_micro_batch_longer(decoder: Decoder, tmp_path: Path, method: str) -> None:
    """Nor does it start again where the memory that there is has been looked at: it cannot be cut."""
    long, short = 3 * support.TASKLET_TOKENS, 10
    lengths = (long, long, *[short] * 22)
    examples = [([5 + i] * length, [0.0] * 4 + [1.0] * (length - 4)) for i, length in enumerate(lengths)]
    spec = support.make_spec(tmp_path, examples=examples, batch_size=6, n_epochs=2, max_length=4 * long, method=method)
    job = support.make_job(decoder, spec)
    longest = long if method == "supervised" else 2 * long
    sizes = set[int]()
    while job.step < job.total_steps // 2:
        shape = job.run_tasklet()
        if shape.kind not in (TaskletKind.FORWARD, TaskletKind.BACKWARD, TaskletKind.EVAL_FORWARD):
            continue
        sizes.add(shape.num_tokens)
        if shape.num_tokens == longest and job.in_flight:
            upcoming = job.upcoming()
            job.require(0)
            assert job.in_flight
            assert job.upcoming() == upcoming
    assert longest in sizes
    assert max(sizes - {longest}) <= support.TASKLET_TOKENS
    job.close()
