"""Micro-batches of numbers of tokens whose matrix products fill a GPU's multiprocessors."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.tasklet import TaskletKind, runs_of
from cotenant.device.cpu.device import CpuDevice
from cotenant.finetune.budget import ladder
from cotenant.finetune.job import TrainingJob
from cotenant.finetune.waves import wave_efficiency
from cotenant.models.decoder import Decoder
from cotenant.models.registry import ARCHITECTURES
from cotenant.models.spec import ModelSpec
from finetune import support

LLAMA = ARCHITECTURES["llama-3.1-8b"]
TINY = ModelSpec("llama", 4, 64, 128, 4, 2, 16, 100, 4096)


@pytest.mark.parametrize(
    ("num_multiprocessors", "better", "worse"),
    [
        (132, 1024, 2944),
        (132, 2048, 2944),
        (124, 1792, 2048),
        (124, 1792, 1920),
        (124, 1792, 3968),
        (124, 3968, 2048),
        (116, 3584, 2048),
        (116, 4096, 2048),
        (108, 3968, 2048),
        (108, 4096, 3968),
        (100, 2816, 2048),
        (84, 3072, 2816),
        (84, 2816, 2048),
    ],
)
def test_numbers_of_tokens_rank_as_measured_on_an_h200(num_multiprocessors: int, better: int, worse: int) -> None:
    figures = [wave_efficiency(LLAMA, num_tokens, num_multiprocessors) for num_tokens in (better, worse)]
    assert figures[0] > figures[1]


@given(st.sampled_from([LLAMA, TINY]), st.integers(1, 10_000), st.integers(1, 300))
def test_an_efficiency_is_a_share(spec: ModelSpec, num_tokens: int, num_multiprocessors: int) -> None:
    assert 0 < wave_efficiency(spec, num_tokens, num_multiprocessors) <= 1


def test_one_multiprocessor_is_always_filled_by_whole_tiles() -> None:
    assert wave_efficiency(LLAMA, 256, 1) == pytest.approx(1)
    assert wave_efficiency(LLAMA, 257, 1) == pytest.approx(257 / 512)


@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(), st.booleans())
def test_rungs_fit_the_device_and_stay_near_the_halvings(
    most: int, longest: int, seed: int, most_is_fixed: bool
) -> None:
    def efficiency(num_tokens: int) -> float:
        return random.Random(f"{seed}/{num_tokens}").uniform(0.5, 1)

    sizes = ladder(most, longest, efficiency, most_is_fixed=most_is_fixed)
    assert sizes[0] == longest
    halvings = [size for size in (most >> step for step in range(6)) if size > longest]
    assert len(sizes) == 1 + len(halvings)
    for rung, halving in zip(sizes[:0:-1], halvings, strict=True):
        fitting = [size for size in range(128, halving + 1, 128) if size > longest and size >= 0.75 * halving]
        if not fitting or (halving == most and most_is_fixed):
            assert rung == halving
        else:
            assert rung in fitting
            assert efficiency(rung) >= efficiency(fitting[-1])
            assert max(map(efficiency, fitting)) < 1.05 * efficiency(rung)
            assert rung == fitting[-1] or efficiency(rung) >= 1.05 * efficiency(fitting[-1])


def test_a_whole_h200_takes_halvings_and_a_part_of_it_takes_less() -> None:
    assert ladder(2048, 100, partial(wave_efficiency, LLAMA, num_multiprocessors=132), most_is_fixed=False) == (
        100, 128, 256, 512, 1024, 2048,
    )  # fmt: skip
    part = partial(wave_efficiency, LLAMA, num_multiprocessors=124)
    assert ladder(2048, 100, part, most_is_fixed=False)[-1] == 1792
    assert ladder(2048, 100, part)[-1] == 2048
    assert ladder(2048, 1900, part, most_is_fixed=False) == (1900, 2048)
    assert ladder(2048, 2048, part, most_is_fixed=False) == (2048,)


class ThreeMultiprocessors(CpuDevice):
    """A small model's products have a tile for every 256 tokens, so 768 tokens fill it and 1,024 fill two thirds."""

    num_multiprocessors = 3


@pytest.mark.parametrize(("limit_is_fixed", "largest"), [(True, 1000), (False, 760)])
def test_a_jobs_micro_batches_fit_its_device(
    decoder: Decoder, tmp_path: Path, limit_is_fixed: bool, largest: int
) -> None:
    """Of examples of 40 tokens 25 go into 1,024, and 19 into 768."""
    spec = support.make_spec(tmp_path, examples=[([7] * 40, [0.0] + [1.0] * 39)] * 60, batch_size=60)
    job = TrainingJob(decoder, spec, 1024, None, device=ThreeMultiprocessors(), limit_is_fixed=limit_is_fixed)
    sizes = [run.shape.num_tokens for run in runs_of(job.upcoming()) if run.shape.kind is TaskletKind.FORWARD]
    assert max(sizes) == largest
    assert sum(sizes) == 2400
    job.close()
