"""The sampler's kernels: transformers' distributions, the CPU's tokens, each row by itself, and no waiting."""

from __future__ import annotations

import time

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cotenant.core.request import SamplingParams
from cotenant.engine.sampler import NOT_FINITE, Sampler, SampleRow
from cotenant.engine.sampling_state import SamplingState
from engine.distributions import FILTERS, NUM_DRAWS, assert_drawn_from

VOCAB_SIZE = 128_256
MIXED = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_p": 0.9},
    {"top_p": 0.95, "temperature": 2.0},
    {"top_k": 7},
    {"top_k": 400, "min_p": 0.001},
    {"temperature": 1.5, "top_k": 50, "top_p": 0.9},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"logit_bias": {5: 3.0}, "top_k": 20},
    {"stop_token_ids": tuple(range(0, 999, 9)), "min_tokens": 4},
]


def state(**params: object) -> SamplingState:
    return SamplingState(SamplingParams(**params))  # type: ignore[arg-type]


def random_logits(num_rows: int, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return (torch.randn(num_rows, vocab_size, generator=generator) * 2.5).to(dtype)  # [rows, vocab]


def mixed_rows(count: int, sampler: Sampler, index: int = 0) -> list[SampleRow]:
    rows = [SampleRow(state(seed=seat, **MIXED[seat % len(MIXED)]), seat, index) for seat in range(count)]
    for row in rows:
        sampler.open(row.seat, row.state, 2, [1, 2, 3])
    return rows


@pytest.mark.parametrize("params", FILTERS.values(), ids=FILTERS.keys())
@pytest.mark.parametrize("vocab_size", [40, 6000])
def test_distribution_is_that_of_transformers(params: dict[str, float], vocab_size: int) -> None:
    logits = random_logits(1, vocab_size, torch.float32)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.get("temperature", 1.0))])
    if "top_k" in params:
        warpers.append(TopKLogitsWarper(int(params["top_k"])))
    if "top_p" in params:
        warpers.append(TopPLogitsWarper(params["top_p"]))
    if "min_p" in params:
        warpers.append(MinPLogitsWarper(params["min_p"]))
    expected = warpers(torch.zeros(1, 1, dtype=torch.long), logits.clone())[0].softmax(-1)
    sampler = Sampler(1, vocab_size, torch.device("cuda"))
    plan = sampler.plan([SampleRow(state(seed=seed, **params), 1, 0) for seed in range(NUM_DRAWS)])
    tokens = sampler.sample(logits.cuda().repeat(NUM_DRAWS, 1), plan).cpu()
    assert_drawn_from(expected, torch.bincount(tokens, minlength=vocab_size) / NUM_DRAWS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1000, 5003, 32_000])
def test_a_seed_gives_the_cpus_tokens(dtype: torch.dtype, vocab_size: int) -> None:
    """Where rounding moves a boundary of the cumulative distribution past the number, a token may differ."""
    count = 66
    cpu, cuda = (Sampler(count, vocab_size, torch.device(device)) for device in ("cpu", "cuda"))
    cpu_rows, cuda_rows = mixed_rows(count, cpu), mixed_rows(count, cuda)
    num_equal, num_steps = 0, 10
    for index in range(num_steps):
        logits = random_logits(count, vocab_size, dtype).roll(index, -1)
        for rows in (cpu_rows, cuda_rows):
            for row in rows:
                row.index = index
        expected = cpu.sample(logits, cpu.plan(cpu_rows))
        tokens = cuda.sample(logits.cuda(), cuda.plan(cuda_rows)).cpu()
        assert torch.equal(cuda.last_tokens[:count].cpu(), tokens)
        greedy = [row.seat for row in cpu_rows if row.state.greedy and not row.state.has_penalties]
        assert torch.equal(tokens[greedy], expected[greedy])
        num_equal += int((tokens == expected).sum())
    assert num_equal >= 0.99 * count * num_steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [5003, VOCAB_SIZE])
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype, vocab_size: int) -> None:
    count, device = 88, torch.device("cuda")
    logits = random_logits(count, vocab_size, dtype).to(device)

    def tokens(places: list[int]) -> torch.Tensor:
        sampler = Sampler(count, vocab_size, device)
        rows = mixed_rows(count, sampler)
        return sampler.sample(logits[places], sampler.plan([rows[place] for place in places]))

    together = tokens(list(range(count)))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    for size in (1, 2, 3, 16, 31):
        for start in range(0, count, size):
            places = order[start : start + size]
            if start // size < 12:
                assert torch.equal(tokens(places), together[places])
    # A slice that starts at an odd address.
    sampler = Sampler(count, vocab_size, device)
    shifted = torch.empty(logits.numel() + 1, dtype=dtype, device=device)[1:].view_as(logits).copy_(logits)
    assert torch.equal(sampler.sample(shifted, sampler.plan(mixed_rows(count, sampler))), together)


def test_nothing_waits_for_the_device() -> None:
    count = 32
    sampler = Sampler(count, VOCAB_SIZE, torch.device("cuda"))
    logits = random_logits(count, VOCAB_SIZE, torch.bfloat16).cuda()
    sampler.warm_up(torch.bfloat16)
    rows = mixed_rows(count, sampler)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index in range(8):
            sampler.open(8, rows[8].state, 1, list(range(200)))
            for row in rows:
                row.index = index
            sampler.sample(logits, sampler.plan(rows))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_penalties_are_counted_on_the_device() -> None:
    sampler = Sampler(2, 100, torch.device("cuda"))
    one = state(temperature=0.0, presence_penalty=100.0)
    logits = random_logits(1, 100, torch.float32).cuda()
    sampler.open(1, one, 1, [0])
    tokens = torch.cat([sampler.sample(logits, sampler.plan([SampleRow(one, 1, index)])) for index in range(90)])
    assert torch.equal(tokens, logits[0].argsort(descending=True)[:90])


def test_ends_are_banned_before_min_tokens() -> None:
    count, num_spared = 24, 3
    sampler = Sampler(count, VOCAB_SIZE, torch.device("cuda"))
    logits = random_logits(count, VOCAB_SIZE, torch.bfloat16)
    ends = tuple(range(0, VOCAB_SIZE, VOCAB_SIZE // 100))[:128]
    logits[:, list(ends)] += 100.0
    without = logits.index_fill(1, torch.tensor(ends), -torch.inf)

    def tokens(logits: torch.Tensor, index: int, **params: object) -> torch.Tensor:
        states = [state(seed=seat, temperature=seat % 3, **params) for seat in range(count)]
        plan = sampler.plan([SampleRow(one, seat, index) for seat, one in enumerate(states)])
        return sampler.sample(logits.cuda(), plan).cpu()

    for index in range(5):
        chosen = tokens(logits, index, stop_token_ids=ends, min_tokens=num_spared)
        assert torch.equal(chosen, tokens(without if index < num_spared else logits, index))
        assert torch.isin(chosen, torch.tensor(ends)).all() == (index >= num_spared)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_named_and_harm_no_other(bad: float) -> None:
    count = len(MIXED)
    logits = random_logits(count, 9000, torch.bfloat16).cuda()

    def tokens(values: torch.Tensor) -> list[int]:
        sampler = Sampler(count, 9000, torch.device("cuda"))
        chosen: list[int] = sampler.sample(values, sampler.plan(mixed_rows(count, sampler))).tolist()
        assert sampler.last_tokens[:count].tolist() == [max(token, 0) for token in chosen]
        return chosen

    expected = tokens(logits)
    for row in range(count):
        broken = logits.clone()
        broken[row, 8123] = bad
        assert tokens(broken) == [NOT_FINITE if place == row else expected[place] for place in range(count)]


@pytest.mark.parametrize("num_rows", [1, 32, 256])
def test_time(num_rows: int) -> None:
    """Prints how long a batch takes on the device, and its plan on the host, in microseconds."""
    sampler = Sampler(num_rows, VOCAB_SIZE, torch.device("cuda"))
    sampler.warm_up(torch.bfloat16)
    logits = random_logits(num_rows, VOCAB_SIZE, torch.bfloat16).cuda()
    kinds: dict[str, dict[str, float]] = {
        "greedy": {"temperature": 0.0},
        "temperature": {"temperature": 0.8},
        "top_p": {"top_p": 0.9},
        "top_p and top_k": {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
        "penalties": {"temperature": 0.0, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    }
    for kind, params in kinds.items():
        rows = [SampleRow(state(seed=seat, **params), seat, 0) for seat in range(num_rows)]
        for row in rows:
            sampler.open(row.seat, row.state, 1, [1])
        plan_started_s = time.perf_counter()
        for _ in range(10):
            plan = sampler.plan(rows)
        plan_us = (time.perf_counter() - plan_started_s) * 1e5
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        tokens = sampler.sample(logits, plan)
        start.record()
        for _ in range(20):
            tokens = sampler.sample(logits, plan)
        end.record()
        end.synchronize()
        print(f"{num_rows} rows, {kind}: device {start.elapsed_time(end) * 50:.0f} us, plan {plan_us:.0f} us")
        assert int(tokens.min()) >= 0
