"""The sampler against transformers' own warpers, and what it promises about seeds, neighbours and seats."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cotenant.core.request import SamplingParams
from cotenant.engine.sampler import NOT_FINITE, Sampler, SampleRow
from cotenant.engine.sampling_state import SamplingState, uniforms
from engine.distributions import FILTERS, NUM_DRAWS, assert_drawn_from

torch.set_num_threads(1)


NUM_SEATS = 8


def random_logits(vocab_size: int, spread: float = 2.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * spread  # [vocab]


def state(**params: object) -> SamplingState:
    return SamplingState(SamplingParams(**params))  # type: ignore[arg-type]


def make_sampler(vocab_size: int, num_seats: int = NUM_SEATS) -> Sampler:
    return Sampler(num_seats, vocab_size, torch.device("cpu"))


def choose(sampler: Sampler, logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    """Sampled tokens; the sampler leaves the logits as they are, and each seat's token where the next step finds it."""
    before = logits.clone()
    tokens: list[int] = sampler.sample(logits, sampler.plan(rows)).tolist()
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    assert sampler.last_tokens[[row.seat for row in rows]].tolist() == [max(token, 0) for token in tokens]
    return tokens


def frequencies(
    logits: torch.Tensor, prompt: tuple[int, ...] = (), generated: tuple[int, ...] = (), **params: object
) -> torch.Tensor:
    """Observed over many seeds, [vocab]."""
    sampler = make_sampler(len(logits), NUM_DRAWS)
    rows = [SampleRow(state(seed=seed, **params), seed, len(generated)) for seed in range(NUM_DRAWS)]
    for row in rows:
        sampler.open(row.seat, row.state, len(prompt), [*prompt, *generated])
    tokens = choose(sampler, logits.repeat(NUM_DRAWS, 1), rows)
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)) / NUM_DRAWS


@pytest.mark.parametrize("params", FILTERS.values(), ids=FILTERS.keys())
@pytest.mark.parametrize("vocab_size", [40, 600])
def test_distribution_is_that_of_transformers(params: dict[str, float], vocab_size: int) -> None:
    logits = random_logits(vocab_size)
    warpers = LogitsProcessorList()
    if "temperature" in params:
        warpers.append(TemperatureLogitsWarper(params["temperature"]))
    if "top_k" in params:
        warpers.append(TopKLogitsWarper(int(params["top_k"])))
    if "top_p" in params:
        warpers.append(TopPLogitsWarper(params["top_p"]))
    if "min_p" in params:
        warpers.append(MinPLogitsWarper(params["min_p"]))
    expected = warpers(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())[0].softmax(-1)
    assert_drawn_from(expected, frequencies(logits, **params))


def test_top_p_of_a_flat_distribution() -> None:
    logits = random_logits(1000, spread=0.1)
    expected = TopPLogitsWarper(0.9)(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())[0].softmax(-1)
    observed = frequencies(logits, top_p=0.9)
    assert 500 < (expected > 0).sum() < 900
    assert observed[expected == 0].sum() == 0
    tail = logits.argsort(descending=True)[400:]
    assert observed[tail].sum() == pytest.approx(float(expected[tail].sum()), abs=0.03)


def test_tokens_as_likely_as_the_last_one_kept_are_kept() -> None:
    logits = torch.tensor([3.0, 1.0, 2.0, 2.0, 2.0, 0.0])
    for params in ({"top_k": 2}, {"top_p": 0.6}, {"top_k": 3, "top_p": 0.9}):
        assert (frequencies(logits, **params) > 0).tolist() == [True, False, True, True, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_seeded_row_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    vocab_size = 1000
    params = [
        {},
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"top_p": 0.95, "temperature": 2.0},
        {"top_k": 7},
        {"top_k": 400, "min_p": 0.001},
        {"temperature": 0.0},
        {"presence_penalty": 1.0},
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"logit_bias": {5: 3.0}},
    ]
    rows = [random_logits(vocab_size, seed=index).to(dtype) for index in range(len(params))]

    def tokens(chosen: tuple[int, ...]) -> list[int]:
        sampler = make_sampler(vocab_size, len(params))
        wanted = [SampleRow(state(seed=index, **params[index]), index, 1) for index in chosen]
        for row in wanted:
            sampler.open(row.seat, row.state, 2, [1, 2, 3])
        return choose(sampler, torch.stack([rows[index] for index in chosen]), wanted)

    alone = [tokens((index,))[0] for index in range(len(params))]
    for order in itertools.islice(itertools.permutations(range(len(params))), 0, 3_000_000, 299_993):
        for size in (2, 5, len(params)):
            assert tokens(order[:size]) == [alone[index] for index in order[:size]]


def test_seeds_repeat_and_differ() -> None:
    logits = random_logits(500)[None]

    def text(seed: int | None) -> list[int]:
        sampler, one = make_sampler(500), state(seed=seed)
        return [choose(sampler, logits, [SampleRow(one, 0, index)])[0] for index in range(20)]

    assert text(7) == text(7)
    assert len({tuple(text(seed)) for seed in (7, -7, 0, 2**63, None)}) == 5
    assert text(None) != text(None)


def test_numbers_are_uniform_and_of_their_index_alone() -> None:
    one, other = state(seed=3), state(seed=4)
    indices = np.arange(20_000, dtype=np.uint64)
    numbers = [uniforms(np.full(len(indices), of.key, dtype=np.uint64), indices) for of in (one, other)]
    assert [one.uniform(index) for index in (0, 7, 19_999)] == [numbers[0][index] for index in (0, 7, 19_999)]
    for drawn in numbers:
        assert drawn.dtype == np.float32
        assert 0 <= drawn.min() < drawn.max() < 1
        counts = np.bincount((drawn * 100).astype(int), minlength=100)
        assert ((counts - 200) ** 2 / 200).sum() < 160  # chi-squared, 99 degrees of freedom: p > 1e-4
    assert abs(np.corrcoef(*numbers)[0, 1]) < 0.03
    assert abs(np.corrcoef(numbers[0][1:], numbers[0][:-1])[0, 1]) < 0.03


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = random_logits(30)
    prompt, generated = (3, 29, 29, 4), (29, 19, 4)  # 29 is the likeliest by far
    processor = RepetitionPenaltyLogitsProcessor(1.7)
    expected = processor(torch.tensor([prompt + generated]), logits[None].clone())[0].softmax(-1)
    assert (expected - logits.softmax(-1)).abs().max() > 0.02
    assert_drawn_from(expected, frequencies(logits, prompt, generated, repetition_penalty=1.7))


def test_frequency_and_presence_penalties_count_generated_tokens_only() -> None:
    logits = random_logits(30, spread=0.5)
    expected = logits.clone()
    expected[3] -= 3 * 0.5 + 0.25
    expected[8] -= 0.5 + 0.25
    observed = frequencies(logits, (1, 2, 3), (3, 3, 3, 8), frequency_penalty=0.5, presence_penalty=0.25)
    assert_drawn_from(expected.softmax(-1), observed)
    expected = logits.clone()
    expected[1] = expected[1] / 1.3 if expected[1] > 0 else expected[1] * 1.3
    expected[4] = (expected[4] / 1.3 if expected[4] > 0 else expected[4] * 1.3) + 2.0
    observed = frequencies(logits, (1,), (4,), presence_penalty=-2.0, repetition_penalty=1.3)
    assert_drawn_from(expected.softmax(-1), observed)


def test_penalties_follow_a_long_generation_and_a_change_of_seat() -> None:
    """Nobody tells the sampler what it chose, until the sequence is preempted and comes back with all its tokens."""
    sampler, one = make_sampler(100), state(temperature=0.0, presence_penalty=100.0)
    logits, tokens = random_logits(100)[None], []
    for seat, count in ((2, 30), (5, 40), (2, 20)):
        sampler.open(seat, one, 1, [0, *tokens])
        tokens += [choose(sampler, logits, [SampleRow(one, seat, len(tokens))])[0] for _ in range(count)]
    assert tokens == logits[0].argsort(descending=True)[:90].tolist()


def test_a_seat_forgets_the_sequence_before() -> None:
    sampler, logits = make_sampler(50), random_logits(50)[None]
    best, second = logits[0].topk(2).indices.tolist()
    penalised, plain = state(temperature=0.0, frequency_penalty=50.0), state(temperature=0.0)
    for _ in range(2):
        sampler.open(3, penalised, 1, [7])
        assert [choose(sampler, logits, [SampleRow(penalised, 3, index)])[0] for index in (0, 1)] == [best, second]
        sampler.open(3, plain, 1, [7])
        assert choose(sampler, logits, [SampleRow(plain, 3, 0)]) == [best]


def test_rows_without_a_seat_are_sampled() -> None:
    logits = random_logits(50).repeat(2, 1)
    row = SampleRow(state(temperature=0.0), NUM_SEATS, 0)
    assert choose(make_sampler(50), logits, [row, row]) == [int(logits[0].argmax())] * 2


def test_logit_bias_bans_and_forces_also_when_greedy() -> None:
    logits = random_logits(50)
    best, second = logits.topk(2).indices.tolist()
    states = [
        state(temperature=0.0, logit_bias={best: -100.0}),
        state(temperature=0.0, logit_bias={17: 100.0}),
        state(temperature=1.0, seed=1, logit_bias={17: 100.0}),
        state(temperature=0.0),
    ]
    rows = [SampleRow(one, seat, 0) for seat, one in enumerate(states)]
    assert choose(make_sampler(50), logits.repeat(4, 1), rows) == [second, 17, 17, best]


def test_extreme_temperatures() -> None:
    logits = random_logits(50).repeat(3, 1)
    rows = [SampleRow(state(temperature=value), seat, 0) for seat, value in enumerate((1e-30, 1e-4, 1e30))]
    cold, cool, hot = choose(make_sampler(50), logits, rows)
    assert cold == cool == int(logits[0].argmax())
    assert hot != NOT_FINITE


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_named_and_harm_no_other(bad: float) -> None:
    logits = torch.stack([random_logits(300, seed=index) for index in range(8)])
    params = [{}, {"top_p": 0.9}, {"temperature": 0.0}, {"presence_penalty": 1.0}] * 2

    def tokens(values: torch.Tensor) -> list[int]:
        sampler = make_sampler(300)
        rows = [SampleRow(state(seed=index, **params[index]), index, 0) for index in range(8)]
        for row in rows:
            sampler.open(row.seat, row.state, 1, [5])
        return choose(sampler, values, rows)

    expected = tokens(logits)
    for row in (0, 3, 5, 6):
        broken = logits.clone()
        broken[row, 123] = bad
        assert tokens(broken) == [NOT_FINITE if index == row else expected[index] for index in range(8)]
